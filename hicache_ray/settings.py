"""What the core needs to know of the configuration, and nothing else of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hicache_ray.errors import ConfigError
from hicache_ray.spec import CacheSpec


class WritePolicy(str, Enum):
    """When a page is backed up from L1 to L2. From L2 it goes to L3 under every policy."""

    WRITE_THROUGH = "write_through"
    SELECTIVE = "write_through_selective"
    WRITE_BACK = "write_back"


class StateSnapshots(str, Enum):
    """Which snapshots of a path are kept: all; so many that their distances from the end at least double; those that the path's last legal
    lengths need. Beside them those where another path leaves this one."""

    ALL = "all"
    LOG = "log"
    LAST = "last"


class PrefetchPolicy(str, Enum):
    """What ends a request's wait for pages on their way from L3.

    ``best_effort``: its turn on the device; it never waits for data beyond that, and has what has arrived by then. ``timeout``: all are
    there, or the deadline. ``wait_complete``: all are there; only the cap ends it before.
    """

    BEST_EFFORT = "best_effort"
    WAIT_COMPLETE = "wait_complete"
    TIMEOUT = "timeout"


class LoadPolicy(str, Enum):
    """How far to resume: as far as what is cached allows, or where the first token is there soonest."""

    ALWAYS_LOAD = "always_load"
    COST = "cost"


class Eviction(str, Enum):
    """Which pages leave a tier first, among those whose loss costs the same (:class:`hicache_ray.policy_order.Cost`)."""

    LRU = "lru"
    LFU = "lfu"
    S3FIFO = "s3fifo"
    PRIORITY = "priority"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Lengths in tokens, times in seconds.

    ``grid``: chunk boundaries of the engine (0: none). ``exact``: resume on the grid from canonical bytes only. ``track_interval``:
    distance of snapshots made during decode. ``storage``: whether L3 is attached. Under ``timeout`` what a request has from L3 may take
    ``prefetch_base_s + prefetch_per_1k_s * tokens / 1024``, and under every policy at most ``prefetch_cap_s``.
    ``prefetch_tokens_in_flight``: most tokens on their way from L3 at once. ``selective_threshold``: at which use a page is backed up
    under ``write_through_selective``. ``device_reserve``: where pages are backed up later than they are made, the share of the device pools
    that can be had without waiting for a copy. ``backup_bytes``: most bytes of a rank on their way to L3 at once that nobody waits for.
    ``hold_deadline_s``: how long what was prefetched is held for its caller.
    The last four are what :mod:`hicache_ray.cost` begins with, of one rank; 0: it is to find out.
    """

    grid: int = 256
    exact: bool = True
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    selective_threshold: int = 2
    device_reserve: float = 0.0
    backup_bytes: int = 1 << 30
    state_snapshots: StateSnapshots = StateSnapshots.ALL
    track_interval: int = 256
    storage: bool = True
    prefetch_policy: PrefetchPolicy = PrefetchPolicy.TIMEOUT
    prefetch_threshold: int = 256
    prefetch_tokens_in_flight: int = 1 << 20
    lookup_deadline_s: float = 2.0
    prefetch_base_s: float = 2.0
    prefetch_per_1k_s: float = 0.1
    prefetch_cap_s: float = 30.0
    copy_deadline_s: float = 30.0
    compute_deadline_s: float = 120.0
    room_deadline_s: float = 30.0
    hold_deadline_s: float = 120.0
    load_or_recompute: LoadPolicy = LoadPolicy.ALWAYS_LOAD
    prefill_tokens_per_s: float = 0.0
    prefill_growth_per_1k: float = 0.0
    storage_bytes_per_s: float = 0.0
    host_bytes_per_s: float = 0.0
    eviction: Eviction = Eviction.LRU

    def check(self, spec: CacheSpec) -> None:
        """Raise :class:`ConfigError` where settings and spec do not go together."""
        page = spec.page_size
        if self.grid % page:
            near = _near(self.grid, page)
            raise ConfigError(f"cache.grid is {self.grid}, which is not a multiple of cache.page_size {page}; choose {near}")
        if self.exact and not self.grid:
            raise ConfigError("cache.exact needs a grid; set cache.grid to a multiple of cache.page_size, or cache.exact to false")
        if self.track_interval < 1 or self.track_interval % page:
            raise ConfigError(
                f"cache.track_interval is {self.track_interval}, which is not a multiple of cache.page_size {page}; "
                f"choose {_near(self.track_interval, page)}"
            )
        for component in spec.components:
            if component.role == "draft" and component.is_state:
                raise ConfigError(f"component {component.name!r} is a draft component of states; a draft component has pages")
            if component.is_state and component.reach % (self.grid or page):
                step, of = (self.grid, "cache.grid") if self.grid else (page, "cache.page_size")
                raise ConfigError(
                    f"component {component.name!r} makes a snapshot every {component.reach} tokens, which is not a multiple of "
                    f"{of} {step}; choose {_near(component.reach, step)}"
                )

    def step(self, spec: CacheSpec) -> int:
        """Tokens between the lengths from which a request may resume."""
        return spec.step(self.grid if self.exact else None)

    def read_deadline(self, tokens: int) -> float:
        """How long it may take to have ``tokens`` tokens from L3, in seconds."""
        if self.prefetch_policy is not PrefetchPolicy.TIMEOUT:
            return self.prefetch_cap_s
        return min(self.prefetch_cap_s, self.prefetch_base_s + self.prefetch_per_1k_s * tokens / 1024)


def _near(value: int, page: int) -> str:
    low = max(page, value // page * page)
    return f"{low} or {low + page}"
