"""Decisions as data: what the core asks of the executors, and what they report.

The core performs no I/O. A stage returns records; every rank executes the records it gets in their order and reports one
:class:`Outcome` per record. Slots index a pool of (tier, component); tokens, lengths and positions are in tokens. All of it is plain
data: numpy int32/int64 arrays, ints, bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hicache_ray.spec import Tier

Slots: TypeAlias = npt.NDArray[np.int32]
Tokens: TypeAlias = npt.NDArray[np.int32]


@dataclass(frozen=True, order=True)
class Embedded:
    """Tokens ``[start, start + count)`` of a prompt that stand for something else, an image or a sound: what they mean is not in their
    ids. ``digest``: of its content, all of it; equal digests say equal content."""

    start: int
    count: int
    digest: bytes

    def touches(self, begin: int, end: int) -> bool:
        """Whether one of its tokens is in ``[begin, end)``."""
        return self.start < end and begin < self.start + self.count


@dataclass(frozen=True)
class Span:
    """Pages of one component that move. Item ``i`` goes from ``source[i]`` to ``target[i]``; on the storage side the slots are empty
    and ``keys[i]`` (page keys; the rank adds its own tag) stands for them. ``pages``: which base page of its prompt each item ends with."""

    component: str
    source: Slots
    target: Slots
    keys: tuple[bytes, ...] = ()
    pages: Slots = field(default_factory=lambda: slots_array())

    def __len__(self) -> int:
        return max(len(self.source), len(self.target), len(self.keys))


@dataclass(frozen=True)
class Move:
    """Copy pages from one tier to another, in the order of the spans. Outcome ``bits[i]``: which items of span ``i`` have arrived; an item
    that is not this rank's counts as arrived. ``turn``: which of the ranks writes what all of them have alike; another turn, another rank.
    """

    id: int
    rid: str
    source: Tier
    target: Tier
    spans: tuple[Span, ...]
    timeout_s: float = 30.0
    turn: int = 0


@dataclass(frozen=True)
class Lookup:
    """Ask L3 which of ``keys`` exist for each component. Outcome ``found``: per component one bitset for each rank."""

    id: int
    rid: str
    keys: tuple[bytes, ...]
    components: tuple[str, ...]
    timeout_s: float = 2.0


@dataclass(frozen=True)
class Compute:
    """Run the model from a cached length.

    ``feed`` are the tokens at positions ``[start, start + len(feed))``; what precedes them is in the cache. They are run in chunks that
    end on the absolute grid (``grid`` tokens; 0: one chunk), then tokens are sampled greedily until there are ``steps`` of them. All but
    the last sampled token enter the cache, so its length becomes ``start + len(feed) + steps - 1``.

    ``tables[component][p]`` is the device slot of page ``p`` (of the component's own span), -1 where no byte of it is needed or
    written. ``live[state component]`` is the slot that the running state is kept in; ``resume[state component]`` the slot of the
    snapshot made at ``start`` (-1: continue with what ``live`` holds; absent at ``start == 0``: begin with zeros). ``snapshots[state
    component]``: (length, slot) pairs; when the cached length is exactly ``length`` the running state is copied to ``slot``. The length
    is a value of the record: a snapshot belongs to the step that made it. ``valid[draft component]``: how many tokens of a draft's cache
    hold, at most ``start``; the draft makes up for the rest.
    """

    id: int
    rid: str
    start: int
    feed: Tokens
    steps: int
    grid: int
    tables: Mapping[str, Slots]
    live: Mapping[str, int] = field(default_factory=dict)
    resume: Mapping[str, int] = field(default_factory=dict)
    snapshots: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    timeout_s: float = 120.0
    valid: Mapping[str, int] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """Cached length when the record is done."""
        return self.start + len(self.feed) + self.steps - 1


@dataclass(frozen=True)
class Digest:
    """Digest pages of the device pool: outcome ``digests``: per component, one hex digest per slot of ``slots``."""

    id: int
    rid: str
    slots: Mapping[str, Slots]
    timeout_s: float = 30.0


@dataclass(frozen=True)
class Clear:
    """Empty L3 of everything whose key begins with ``prefix``. Outcome: no error when it is done; ``count`` objects were removed."""

    id: int
    rid: str
    timeout_s: float = 30.0
    prefix: bytes = b""


Record: TypeAlias = Move | Lookup | Compute | Digest | Clear


class Lane(str, Enum):
    """Records of one lane are executed in turn by a rank (of ``STORAGE``, they begin in turn); lanes do not wait for each other."""

    ASK = "ask"
    COMPUTE = "compute"
    COPY = "copy"
    STORAGE = "storage"


def lane_of(record: Record) -> Lane:
    """The lane of a record; questions to L3 as a whole (``ASK``) are no rank's."""
    if isinstance(record, (Lookup, Clear)):
        return Lane.ASK
    if isinstance(record, Compute):
        return Lane.COMPUTE
    return Lane.STORAGE if isinstance(record, Move) and Tier.STORAGE in (record.source, record.target) else Lane.COPY


@dataclass(frozen=True)
class Outcome:
    """What one rank reports of one record. ``error`` is a sentence, empty when all went well; bits may be partial either way.

    ``refused``: the error is what was asked for, not what became of it. ``retry``: of a lookup, there may be more when asked again.
    ``late``: the error is that there was no answer in time.
    """

    bits: tuple[int, ...] = ()
    found: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    output: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    digests: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    error: str = ""
    refused: bool = False
    count: int = 0
    retry: bool = False
    late: bool = False


@dataclass(frozen=True)
class Merged:
    """One record over all ranks: bits intersected, digests as [rank] per slot, what the ranks agreed on, the first error."""

    bits: tuple[int, ...] = ()
    found: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    output: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    digests: Mapping[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict)
    error: str = ""
    refused: bool = False
    count: int = 0
    retry: bool = False
    late: bool = False


def slots_array(values: object = ()) -> Slots:
    """An int32 array of slots."""
    return np.asarray(values, dtype=np.int32).reshape(-1)
