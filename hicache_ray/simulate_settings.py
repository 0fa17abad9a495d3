"""What the settings of a simulated group may be, and what requests ask for beside their tokens: a seed draws from these."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from hicache_ray.settings import Eviction, LoadPolicy, PrefetchPolicy, StateSnapshots, WritePolicy

PAGE = 8

#: Setting -> its values, the usual one first.
CHOICES: Mapping[str, Sequence[Any]] = {
    "write_policy": tuple(WritePolicy),
    "selective_threshold": (2, 1, 3),
    "device_reserve": (0.0, 0.1, 0.5),
    "backup_bytes": (1 << 30, 1, 400),
    "state_snapshots": tuple(StateSnapshots),
    "track_interval": (PAGE, 2 * PAGE),
    "eviction": tuple(Eviction),
    "prefetch_policy": (PrefetchPolicy.TIMEOUT, PrefetchPolicy.BEST_EFFORT, PrefetchPolicy.WAIT_COMPLETE),
    "prefetch_threshold": (0, 2 * PAGE, 5 * PAGE),
    "prefetch_tokens_in_flight": (1 << 20, 3 * PAGE, 10 * PAGE),
    "lookup_deadline_s": (2.0, 0.02),
    "prefetch_base_s": (2.0, 0.02),
    "prefetch_per_1k_s": (0.1, 2.0),
    "prefetch_cap_s": (30.0, 0.3),
    "room_deadline_s": (30.0, 0.3),
    "load_or_recompute": tuple(LoadPolicy),
    "prefill_tokens_per_s": (0.0, 4000.0),
    "prefill_growth_per_1k": (0.0, 3.0),
    "storage_bytes_per_s": (0.0, 5e3, 1e6),
    "host_bytes_per_s": (0.0, 1e5),
}
#: What everything is compared with: each setting as usual.
USUAL: Mapping[str, Any] = {name: values[0] for name, values in CHOICES.items()}
#: Of a request: the first of each is usual.
PRIORITIES = (0, 1, 5, -3)
LIFETIMES_S: Sequence[float | None] = (None, 0.0, 0.05, 2.0)
#: Share of settings (and of hints) that are as usual whatever else there is.
AS_USUAL = 0.4


def choose(rng: random.Random, values: Sequence[Any]) -> Any:
    """One of some values: often the first."""
    return values[0] if rng.random() < AS_USUAL else rng.choice(values)


def draw(rng: random.Random, pinned: Mapping[str, Any]) -> Mapping[str, Any]:
    """A value of each setting, ``pinned`` ones as they are. What is pinned changes nothing of the others."""
    return {name: choose(rng, values) for name, values in CHOICES.items()} | dict(pinned)
