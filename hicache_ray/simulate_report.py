"""Measures with the simulator: what share of requests and of tokens each policy reuses, on families of branching prompts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hicache_ray.settings import WritePolicy
from hicache_ray.simulate import Tally, simulate
from hicache_ray.simulate_cases import cases

#: Models that are measured, and the capacities under which policies differ, in pages per component.
MODELS = ("full", "window", "state", "hybrid", "exact")
L1, L2, L3 = 40, 60, 160


@dataclass(frozen=True)
class Row:
    """One history without faults."""

    case: str
    policy: str
    tally: Tally


def measure(seed: int, steps: int) -> list[Row]:
    """The same families of prompts under every policy."""
    return list(_rows(seed, steps))


def _rows(seed: int, steps: int) -> Iterator[Row]:
    for name in MODELS:
        for policy in WritePolicy:
            case = replace(cases()[name], policy=policy, faults=0.0, calm=True, l1=(L1, L1), l2=(L2, L2), l3=(L3, L3))
            yield Row(name, policy.value, simulate(seed, steps, case))
