"""The index of one cache group: page key -> where its objects are in L1 and L2, for all ranks at once.

An entry is a small integer id under a page key. It exists while at least one tier holds one of its objects. Slots are kept in one matrix,
so that questions about a path of pages are a few vector operations, whatever the number of cached pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from hicache_ray.errors import Inconsistent
from hicache_ray.keys import mark_of
from hicache_ray.lease import Place
from hicache_ray.policy_order import Entries
from hicache_ray.records import Slots

ABSENT = -1


def to_bits(flags: npt.NDArray[np.bool_]) -> int:
    """A bitset: bit i is ``flags[i]``."""
    return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")


def from_bits(bits: int, count: int) -> npt.NDArray[np.bool_]:
    """The lowest ``count`` bits as flags."""
    raw = np.frombuffer((bits & ((1 << count) - 1)).to_bytes((count + 7) // 8, "little"), dtype=np.uint8)
    return np.unpackbits(raw, count=count, bitorder="little").astype(bool)


class Index:
    """Entries over ``places`` = the (tier, component) pairs of the group."""

    def __init__(self, places: Iterable[Place]) -> None:
        self._column = {place: i for i, place in enumerate(places)}
        self._ids: dict[bytes, int] = {}
        self._keys: list[bytes | None] = []
        self._unused: list[int] = []
        self._marks = np.zeros(64, dtype=np.int64)
        self._slots = np.full((len(self._column), 64), ABSENT, dtype=np.int32)
        self._durable = np.zeros((len(self._column), 64), dtype=bool)
        self._uses = np.zeros((len(self._column), 64), dtype=np.int32)
        self._depth = np.full(64, ABSENT, dtype=np.int32)
        self._inner = np.zeros(64, dtype=bool)  # a cached path goes on behind this page
        self._fork = np.zeros(64, dtype=bool)  # another path leaves a cached one soon after this page

    def __len__(self) -> int:
        return len(self._ids)

    def find(self, keys: Sequence[bytes]) -> Entries:
        """Entries of the keys, ``ABSENT`` where there is none. Changes nothing."""
        get = self._ids.get
        return np.fromiter((get(k, ABSENT) for k in keys), dtype=np.int32, count=len(keys))

    def slots(self, place: Place, entries: Entries) -> Slots:
        """Slots of the entries in a place, ``ABSENT`` where they have none (or are ``ABSENT`` themselves). Changes nothing."""
        out = self._slots[self._column[place]][entries]
        out[entries == ABSENT] = ABSENT
        return out

    def present(self, place: Place, entries: Entries) -> int:
        """Bitset over the entries: which have a slot in the place. Changes nothing."""
        return to_bits(self.slots(place, entries) != ABSENT)

    def key(self, entry: int) -> bytes:
        key = self._keys[entry]
        if key is None:
            raise Inconsistent(f"the entry {entry} is gone")
        return key

    def marks(self, entries: Entries) -> npt.NDArray[np.int64]:
        """Numbers that stand for the keys of the entries (all there), also after they have gone."""
        return self._marks[entries]

    def put(self, place: Place, keys: Sequence[bytes], slots: Slots) -> Entries:
        """Say that the objects of ``keys`` are in ``slots`` of ``place`` (they must not be there yet). Returns their entries."""
        entries = self.find(keys)
        for i in np.flatnonzero(entries == ABSENT).tolist():
            entries[i] = self._new(keys[i])
        row = self._slots[self._column[place]]
        if (row[entries] != ABSENT).any():
            raise Inconsistent(f"a page is already in the {place[0].value} pool {place[1]!r}")
        row[entries] = slots
        return entries

    def _new(self, key: bytes) -> int:
        if self._unused:
            entry = self._unused.pop()
            self._keys[entry] = key
        else:
            entry = len(self._keys)
            self._keys.append(key)
            if entry >= self._slots.shape[1]:
                self._slots = np.concatenate([self._slots, np.full_like(self._slots, ABSENT)], axis=1)
                self._durable = np.concatenate([self._durable, np.zeros_like(self._durable)], axis=1)
                self._uses = np.concatenate([self._uses, np.zeros_like(self._uses)], axis=1)
                self._depth = np.concatenate([self._depth, np.full_like(self._depth, ABSENT)])
                self._inner = np.concatenate([self._inner, np.zeros_like(self._inner)])
                self._fork = np.concatenate([self._fork, np.zeros_like(self._fork)])
                self._marks = np.concatenate([self._marks, np.zeros_like(self._marks)])
        self._marks[entry] = mark_of(key)
        self._ids[key] = entry
        return entry

    def remove(self, place: Place, entries: Entries) -> Slots:
        """The objects of the entries leave a place; returns the slots they had. Entries with nothing left are forgotten."""
        column = self._column[place]
        slots = self._slots[column][entries]
        if (slots == ABSENT).any():
            raise Inconsistent(f"a page was removed that is not in the {place[0].value} pool {place[1]!r}")
        self._slots[column][entries] = ABSENT
        for entry in entries[(self._slots[:, entries] == ABSENT).all(axis=0)].tolist():
            del self._ids[self.key(entry)]
            self._keys[entry] = None
            self._durable[:, entry] = False
            self._uses[:, entry] = 0
            self._inner[entry] = self._fork[entry] = False
            self._depth[entry] = ABSENT  # the next one under this id is elsewhere in its prompt
            self._unused.append(entry)
        return slots

    def in_place(self, place: Place) -> Entries:
        """All entries with a slot in the place."""
        return np.flatnonzero(self._slots[self._column[place]] != ABSENT).astype(np.int32)

    def set_durable(self, place: Place, entries: Entries, sealed: bool | npt.NDArray[np.bool_] = True) -> None:
        """A hint: L3 has sealed these objects (of the place's component), or it turned out that it has not. Skips ``ABSENT`` ones."""
        known = entries != ABSENT
        self._durable[self._column[place], entries[known]] = sealed if isinstance(sealed, bool) else sealed[known]

    def durable(self, place: Place, entries: Entries) -> npt.NDArray[np.bool_]:
        return self._durable[self._column[place]][entries]

    def use(self, place: Place, entries: Entries) -> None:
        """A request has made or used these objects (of the place's component), each once."""
        self._uses[self._column[place], entries[entries != ABSENT]] += 1

    def uses(self, place: Place, entries: Entries) -> npt.NDArray[np.int32]:
        """How many requests have, as long as the group has had the entries; 0 where there is none."""
        out = self._uses[self._column[place]][entries]
        out[entries == ABSENT] = 0
        return out

    def set_depth(self, entries: Entries, pages: npt.NDArray[np.int32]) -> None:
        """Which page of its prompt each of these is; the same in every prompt that has it."""
        self._depth[entries[entries != ABSENT]] = pages[entries != ABSENT]

    def depth(self, entries: Entries) -> npt.NDArray[np.int32]:
        """Which pages of their prompts these (all there) are. Raises where that was never said: a rank that holds its pages in turn would
        take others' for its own."""
        out = self._depth[entries]
        if (out == ABSENT).any():
            raise Inconsistent("a page is cached of which nobody has said where in its prompt it is")
        return out

    def follow(self, entries: Entries) -> None:
        """These are the pages of one path, root first: behind each but the last one it goes on."""
        known = entries[:-1]
        self._inner[known[known != ABSENT]] = True

    def goes_on(self, entry: int) -> bool:
        """Whether a path that was cached goes on behind this page."""
        return entry != ABSENT and bool(self._inner[entry])

    def mark_fork(self, entries: Entries) -> None:
        """Another path leaves a cached one between these and the next snapshot."""
        self._fork[entries[entries != ABSENT]] = True

    def forks(self, entries: Entries) -> npt.NDArray[np.bool_]:
        return self._fork[entries] & (entries != ABSENT)

    def clear_durable(self) -> None:
        """L3 was emptied or taken away."""
        self._durable[:] = False

    def check(self) -> None:
        """Raise unless keys, ids and slots tell the same story."""
        live = {i for i, key in enumerate(self._keys) if key is not None}
        if live != set(self._ids.values()) or any(self._keys[i] != k for k, i in self._ids.items()):
            raise Inconsistent("keys and entries of the index differ")
        if live & set(self._unused) or len(set(self._unused)) != len(self._unused):
            raise Inconsistent("an entry is in use and unused")
        held = set(np.flatnonzero(np.any(self._slots != ABSENT, axis=0)).tolist())
        if held != live:
            raise Inconsistent(f"{len(held ^ live)} entries exist without an object, or the other way round")
        for place, column in self._column.items():
            used = self._slots[column][self._slots[column] != ABSENT]
            if len(np.unique(used)) != len(used):
                raise Inconsistent(f"two entries share a slot of the {place[0].value} pool {place[1]!r}")
