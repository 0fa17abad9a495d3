"""Load or recompute: which legal length gives the first token soonest.

A model of the machine in few numbers, seeded by the configuration and corrected by what records have really taken: seconds per token of
prefill (attention makes later ones dearer), and how long a link between tiers takes for so many bytes. It has no clock and no chance:
durations are given.

**The promise.** With a store of stationary speed, however slow, a request is at most 5 % slower than without the store. Two things hold it:

* A link's time is *bounded* by what was measured: for ``b`` bytes it takes at most ``T * max(1, b / B)`` where ``B`` bytes took ``T``, as
  long as its time is some latency and then in proportion; a read in several records takes as much for each. A load is trusted only
  where the bound beats recomputing.
* What has not been measured is tried with a deadline of :data:`PATIENCE` of the time that recomputing takes; so is the question to the
  store. What is late is measured all the same, when it ends. One try is under way at a time; after a link has been found too slow it is
  tried again at every :data:`AGAIN`-th request that would have used it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hicache_ray import lengths, transfer
from hicache_ray.records import Compute, Lookup, Merged, Move, Record
from hicache_ray.resume import ORDER, Match
from hicache_ray.settings import Settings
from hicache_ray.spec import CacheSpec, Tier

#: Of the time that recomputing takes: how long the store's answer, and then a try, may take each.
PATIENCE = 0.022
AGAIN = 64
#: Weight of a new measurement.
NEW = 0.3
#: Lengths that are compared at most.
CANDIDATES = 64
#: Until decoding was measured, a decoded token counts as so many of a prompt. Too many is the safe side: prefill seems faster than it is.
DECODED = 64


@dataclass
class Link:
    """How long something takes by its size. ``seen``: power of two -> (mean size, mean seconds), newer ones weigh more."""

    seen: dict[int, tuple[float, float]] = field(default_factory=dict)

    def learn(self, size: float, seconds: float) -> None:
        size = max(size, 1.0)
        old = self.seen.get(bucket := int(size).bit_length(), (size, seconds))
        self.seen[bucket] = (old[0] + NEW * (size - old[0]), old[1] + NEW * (seconds - old[1]))

    def most(self, size: float) -> float:
        """Seconds that ``size`` takes at most; infinite where nothing was measured."""
        return min((t * max(1.0, size / b) for b, t in self.seen.values()), default=float("inf"))

    def least(self, size: float) -> float:
        """Seconds that it takes at least."""
        return max((t * min(1.0, size / b) for b, t in self.seen.values()), default=0.0)


@dataclass(frozen=True)
class Choice:
    """Resume at ``length`` pages. ``patience_s``: how long its load from L3 may take; ``numbers``: what was weighed, for ``explain``."""

    length: int
    patience_s: float
    numbers: Mapping[str, float | str]


class Cost:
    """The model of one cache group."""

    def __init__(self, spec: CacheSpec, settings: Settings) -> None:
        self._spec, self._growth = spec, settings.prefill_growth_per_1k
        self.storage, self.host, self.lookup = Link(), Link(), Link()
        # Sizes of one page upwards: a seed says nothing about latency. Of storage it is a hope only: it decides whether to try.
        self.hope_s = 1 / settings.storage_bytes_per_s if settings.storage_bytes_per_s else 0.0
        if settings.host_bytes_per_s:
            self.host.learn(float(1 << 20), (1 << 20) / settings.host_bytes_per_s)
        self.token_s = 1 / settings.prefill_tokens_per_s if settings.prefill_tokens_per_s else 0.0
        self.decode_s = 0.0
        self._trying = 0
        self._declined = 0
        self._unasked = 0

    # -- what was measured ----------------------------------------------------------------------------------------------------------

    def learn(self, record: Record, got: Merged, seconds: float) -> None:
        """A record has taken so long on the slowest rank, whether or not its story has waited for it."""
        if isinstance(record, Lookup):
            self.lookup.learn(len(record.keys), seconds)
        elif isinstance(record, Compute) and not got.error:
            self._computed(record, seconds)
        elif isinstance(record, Move) and record.source is Tier.STORAGE:
            self._read(self._bytes((s.component, len(s)) for s in record.spans), got, record, seconds)
        elif isinstance(record, Move) and (record.source, record.target) == (Tier.HOST, Tier.DEVICE) and not got.error:
            self.host.learn(self._bytes((s.component, len(s)) for s in record.spans), seconds)

    def _read(self, size: int, got: Merged, record: Move, seconds: float) -> None:
        whole = not got.error and all(bits.bit_count() == len(span) for bits, span in zip(got.bits, record.spans, strict=True))
        # One that has failed says only that it would have taken longer.
        if whole or seconds > self.storage.most(size):
            self.storage.learn(size, seconds)
        self._trying = 0

    def _computed(self, record: Compute, seconds: float) -> None:
        fed, decoded = len(record.feed), record.steps - 1
        if fed == 1 and decoded:
            self.decode_s = _mean(self.decode_s, seconds / record.steps)
            return
        if fed < self._spec.page_size:
            return
        work = self._work(record.start, record.start + fed)
        each = max(0.0, seconds - decoded * self.decode_s) / work if self.decode_s else seconds / (work + decoded * DECODED)
        self.token_s = _mean(self.token_s, each)

    def _bytes(self, parts: Iterable[tuple[str, int]]) -> int:
        return sum(self._spec[name].page_bytes(self._spec.page_size) * n for name, n in parts)

    def _work(self, start: int, end: int) -> float:
        """Tokens ``[start, end)``, each worth more with what is before it."""
        return (end - start) * (1 + self._growth * (start + end) / 2 / 1024)

    def prefill(self, start: int, end: int) -> float:
        """Seconds of it."""
        return self.token_s * self._work(start, end)

    # -- decisions ------------------------------------------------------------------------------------------------------------------

    def ask_s(self, found: Match, count: int) -> float:
        """How long a request of ``count`` tokens may wait for the store's answer; 0: it does not ask. ``found``: what is local."""
        patience = PATIENCE * self._near(found, count)[1]
        if self.lookup.least(len(found.keys)) <= patience:
            return patience
        self._unasked += 1
        return patience if self._unasked % AGAIN == 0 else 0.0

    def local(self, found: Match, count: int) -> int:
        """The length to resume at from what L1 and L2 have, in pages."""
        return self._near(found, count)[0]

    def choose(self, found: Match, count: int, most: int) -> Choice:
        """Of the legal lengths up to ``most`` pages. Where storage is tried or trusted, with a deadline."""
        near, recompute_s = self._near(found, count)
        page = self._spec.page_size
        best, trusted_s, load_s, hopeful_s = near, recompute_s, 0.0, float("inf")
        for k in _some(found.lengths(*ORDER) & lengths.ones(most + 1)):
            far, up, reads = self._needs(found, k)
            if not far:
                continue
            rest = self.prefill(k * page, count) + self._up(up)
            read_s = reads * self.storage.most(far / reads)
            if read_s + rest < trusted_s:
                best, trusted_s, load_s = k, read_s + rest, read_s
            if k == most:
                hopeful_s = rest + max(self.storage.least(far), 0.0 if self.storage.seen else far * self.hope_s)
        numbers: dict[str, float | str] = {
            "recompute_s": round(recompute_s, 6), "load_s": round(load_s, 6), "first_token_s": round(trusted_s, 6),
            "prefill_tokens_per_s": round(1 / self.token_s, 1) if self.token_s else 0.0,
        }  # fmt: skip
        if best != near:
            # Its speed is known and stationary; where it is not so any more, this ends the wait.
            return Choice(best, max(2 * load_s, PATIENCE * recompute_s), {"decision": "load", **numbers})
        # Of what is near and not worth its way to the device nothing is read, so that there is nothing to try.
        if hopeful_s != float("inf") and self._may_try(hopeful_s < recompute_s):
            return Choice(most, PATIENCE * recompute_s, {"decision": "try", **numbers})
        return Choice(near, 0.0, {"decision": "recompute", **numbers})

    def _may_try(self, hopeful: bool) -> bool:
        """Whether it is time for a try. One that brings no measurement (it found no room) is forgotten after a while."""
        self._trying = max(0, self._trying - 1)
        self._declined += not hopeful
        if self._trying or not (hopeful or self._declined % AGAIN == 0):
            return False
        self._trying = AGAIN
        return True

    def _near(self, found: Match, count: int) -> tuple[int, float]:
        """The best length without storage, and when its first token is there."""
        options = [
            (self.prefill(k * self._spec.page_size, count) + self._up(self._needs(found, k)[1]), -k)
            for k in _some(found.lengths(*ORDER[:2]))
        ]
        seconds, k = min(options)
        return -k, seconds

    def _up(self, size: int) -> float:
        """L2 to L1. Never measured: no reason to fear it."""
        return self.host.most(size) if size and self.host.seen else 0.0

    def _needs(self, found: Match, k: int) -> tuple[int, int, int]:
        """Bytes that a resume at ``k`` pages needs from L3, and that it needs from L2 and L3; the records in which those from L3 come."""
        far = up = most = 0
        for c, _, needed in found.needs(k):
            if c.role == "draft":
                continue
            size, absent = c.page_bytes(self._spec.page_size), needed[Tier.STORAGE].bit_count()
            up += (needed[Tier.HOST].bit_count() + absent) * size
            far, most = far + absent * size, max(most, absent)
        return far, up, -(-most // transfer.piece(most))


def _some(legal: int) -> list[int]:
    """Members of a set of lengths, both ends and at most so many."""
    members = list(lengths.members(legal))
    if len(members) <= CANDIDATES:
        return members
    step = (len(members) - 1) / (CANDIDATES - 1)
    return [members[round(i * step)] for i in range(CANDIDATES)]


def _mean(old: float, new: float) -> float:
    return old + NEW * (new - old) if old else new
