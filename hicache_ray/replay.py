"""Replays a trace through the production core: match, plan, insert, backup and eviction decide; nothing moves, and nothing is computed.

A block of the trace is a page, named by the block's identity, so that no token is hashed. Requests run one after the other, on the trace's
clock; what a record asks for has succeeded when it is asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from hicache_ray.cache import Cache
from hicache_ray.errors import CapacityError, ConfigError
from hicache_ray.group import Group
from hicache_ray.keys import Namespace
from hicache_ray.records import Compute, Lookup, Move, Outcome, Record
from hicache_ray.residency import Residency
from hicache_ray.resume import Path
from hicache_ray.settings import Eviction, Settings, WritePolicy
from hicache_ray.spec import CacheSpec, Component, Field, Kind, Tier
from hicache_ray.store import DIGEST_BYTES, KEY_BYTES
from hicache_ray.story import Ended, Job, Request
from hicache_ray.trace import BLOCK, Ceiling, Traced, ceiling

Progress = Callable[[int], None]
NAME = "blocks"
#: Requests between two calls of a progress function.
EVERY = 200


@dataclass(frozen=True)
class Sizes:
    """Capacities in blocks. ``device``: None is as many as the trace can use. ``host``: 0 is no host tier. ``storage``: one without bound,
    behind a host."""

    device: int | None = None
    host: int = 0
    storage: bool = False


@dataclass(frozen=True)
class Replayed:
    """What one policy reached with one size. Counts in blocks; ``tiers``: hits by the tier that they came from.

    ``refused``: requests longer than the device, which miss altogether. ``seconds``: how long it took.
    """

    policy: str
    sizes: Sizes
    blocks: int
    tiers: dict[str, int]
    evictions: int
    refused: int
    seconds: float

    @property
    def hit_ratio(self) -> float:
        return sum(self.tiers.values()) / self.blocks

    def to_json(self) -> dict[str, object]:
        """Ratios are fractions of all blocks of the trace."""
        return {
            "policy": self.policy,
            "capacity": self.sizes.device,
            "host": self.sizes.host,
            "storage": "unlimited" if self.sizes.storage else None,
            "hit_ratio": self.hit_ratio,
            "tiers": {tier: hits / self.blocks for tier, hits in self.tiers.items()},
            "hit_blocks": sum(self.tiers.values()),
            "evictions": self.evictions,
            "refused_requests": self.refused,
            "seconds": round(self.seconds, 3),
        }


def spec_of(block: int) -> CacheSpec:
    """One component of full attention whose page is a block."""
    return CacheSpec("trace", block, (Component(NAME, Kind.FULL, (Field("kv", 1, 1),)),))


def key_of(block: int) -> bytes:
    """The page key of a block; the trace's identity names its whole prefix already. Spread over all 64 bits, as digests are."""
    spread = (block + 1) * 0x9E3779B97F4A7C15 % (1 << 64)
    return bytes(KEY_BYTES - DIGEST_BYTES) + block.to_bytes(DIGEST_BYTES - 8, "little") + spread.to_bytes(8, "little")


class _TraceCache(Cache):
    """The production cache, told the names of a request's pages instead of hashing tokens."""

    def __init__(self, res: Residency, settings: Settings) -> None:
        super().__init__(res, settings)
        self.keys: tuple[bytes, ...] = ()

    def job(self, request: Request) -> Job:
        count = len(request.tokens)
        have = self.res.capacity[(Tier.DEVICE, NAME)]
        if -(-count // self.spec.page_size) > have:
            raise CapacityError(f"a prompt of {count} tokens does not fit a device of {have} blocks")
        return Job(request, Path(self.keys), self.allowed(count), self.res.era)


@dataclass
class _Virtual:
    """The one rank and the store, without bytes. ``stored``: keys that L3 has."""

    stored: set[bytes] = field(default_factory=set)

    def run(self, record: Record) -> Outcome:
        if isinstance(record, Compute):
            return Outcome(output=(0,) * record.steps)
        if isinstance(record, Lookup):
            bits = int("".join("1" if key in self.stored else "0" for key in reversed(record.keys)) or "0", 2)
            return Outcome(found=dict.fromkeys(record.components, (bits,)))
        if not isinstance(record, Move):
            return Outcome()
        if record.target is Tier.STORAGE:
            for span in record.spans:
                self.stored.update(span.keys)
        return Outcome(bits=tuple((1 << len(span)) - 1 for span in record.spans))


class Replay:
    """One trace, one policy, one size. ``group.check()`` may be called between any two requests."""

    def __init__(self, policy: str, sizes: Sizes, limits: Ceiling, block: int = BLOCK) -> None:
        if policy not in list(Eviction):
            raise ConfigError(f'there is no policy "{policy}"; choose some of {", ".join(Eviction)}')
        self.policy, self.sizes, self.limits, self.block = policy, sizes, limits, block
        device = limits.distinct + limits.longest if sizes.device is None else sizes.device
        if device < 1 or sizes.host < 0:
            raise ConfigError(f"a capacity is at least 1 block; {device} and {sizes.host} (--host) were given")
        if sizes.storage and not sizes.host:
            raise ConfigError("pages come to storage (--storage) through a host tier; give that some blocks (--host)")
        spec = spec_of(block)
        self.res = Residency(spec, {(Tier.DEVICE, NAME): device, (Tier.HOST, NAME): sizes.host})
        # Without a host nothing can be written through to it.
        write = WritePolicy.WRITE_THROUGH if sizes.host else WritePolicy.WRITE_BACK
        settings = Settings(
            grid=block, track_interval=block, write_policy=write, storage=sizes.storage, prefetch_threshold=0, eviction=Eviction(policy)
        )
        self.cache = _TraceCache(self.res, settings)
        self.now = 0.0
        self.group = Group(self.cache, lambda: self.now)
        self.rank = _Virtual()
        self.tiers = dict.fromkeys((tier.value for tier in Tier), 0)
        self.refused = 0
        self._namespace = Namespace("trace", page_size=block)
        self._tokens = np.zeros(0, dtype=np.int32)

    def request(self, traced: Traced) -> int:
        """Serve one request to its end, its backup as well; how many blocks were a hit."""
        self.now = max(self.now, traced.at)
        if traced.tokens > len(self._tokens):
            self._tokens = np.zeros(2 * traced.tokens, dtype=np.int32)
        self.cache.keys = tuple(key_of(i) for i in traced.blocks[: traced.whole(self.block)])
        try:
            self.group.submit(Request("request", self._tokens[: traced.tokens], self._namespace))
        except CapacityError:
            self.refused += 1
            return 0
        while envelopes := self.group.take():
            for e in envelopes:
                self.group.report(e.rank, e.record.id, e.incarnation, self.rank.run(e.record))
        return self._count()

    def _count(self) -> int:
        hits = 0
        for event in self.group.events():
            if isinstance(event, Ended):
                if event.error is not None:
                    raise event.error
                assert event.report is not None
                for tier in Tier:
                    blocks = getattr(event.report, tier.value) // self.block
                    self.tiers[tier.value] += blocks
                    hits += blocks
        return hits

    def run(self, requests: Sequence[Traced], progress: Progress | None = None) -> Replayed:
        """The whole trace. ``progress`` is told now and then how many requests are done."""
        began = time.perf_counter()
        for i, traced in enumerate(requests):
            if progress is not None and i % EVERY == 0:
                progress(i)
            self.request(traced)
        evictions = sum(self.res.counters[(tier, NAME)].evictions for tier in (Tier.DEVICE, Tier.HOST))
        seconds = time.perf_counter() - began
        return Replayed(self.policy, self.sizes, self.limits.blocks, dict(self.tiers), evictions, self.refused, seconds)


def replay(requests: Sequence[Traced], policy: str = "lru", sizes: Sizes = Sizes(), block: int = BLOCK) -> Replayed:
    """One trace, one policy, one size."""
    return Replay(policy, sizes, ceiling(requests, block), block).run(requests)
