"""Who holds what: one home's part of the directory of a store of many nodes.

An entry says "``holder`` has a visible object ``id``". A holder is ``"<node id>:<incarnation>"``, so what a node said before it died never
counts for the one that came back. Entries are soft state: a hint for lookups, lost with the home, said again by the holders. Nothing is
ever read because an entry says so without the holder's own check.

**Fences.** ``forget`` ends what is known of a prefix; an announcement that was on its way must not bring it back. So the home counts its
``forget`` calls (the *epoch*), and an announcement says since which epoch its bytes were seen visible. One that saw them before the last
``forget`` of their prefix is refused; the holder looks again and says it anew. As ``clear`` empties the nodes' stores before the homes
forget, what is seen visible after that is really there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from hicache_ray.errors import Inconsistent, StoreClosed, StoreError
from hicache_ray.storage import bits
from hicache_ray.storage.ids import require_ids, require_keys

#: ``since`` of an announcement that no fence refuses.
ALWAYS = (1 << 63) - 1

_FENCES = 256


def holder_name(node: str, incarnation: str) -> str:
    """The name of a node's incarnation in the directory."""
    return f"{node}:{incarnation}"


@runtime_checkable
class Directory(Protocol):
    """One home's part of the directory. Calls are batched; each raises StoreError, StoreTimeout after ``timeout_s`` seconds."""

    def epoch(self, timeout_s: float) -> int:
        """How many times this home has been told to forget: what to announce with, read *before* the bytes are seen visible. < 2**63."""
        ...

    def announce(self, holder: str, ids: Sequence[bytes], timeout_s: float, since: int = ALWAYS) -> int:
        """Enter ``holder`` for each of ``ids``. Returns the bitset of those entered; the rest was forgotten after epoch ``since``."""
        ...

    def withdraw(self, holder: str, ids: Sequence[bytes], timeout_s: float) -> None:
        """``holder`` has ``ids`` no longer. Unknown ones are fine."""
        ...

    def where(self, keys: Sequence[bytes], tags: Sequence[bytes], timeout_s: float) -> Mapping[bytes, Mapping[str, int]]:
        """Tag -> holder -> bitset over ``keys``. Every tag is in the answer; a holder of nothing is not."""
        ...

    def holders(self, ids: Sequence[bytes], timeout_s: float) -> Sequence[tuple[str, ...]]:
        """The holders of each id, the earliest first; empty where there is none."""
        ...

    def forget(self, prefix: bytes, timeout_s: float) -> int:
        """Remove the entries, of every holder, whose id starts with ``prefix``, and fence it. Returns how many ids went."""
        ...


@dataclass(frozen=True)
class DirectoryStats:
    """``entries``: ids known now. The rest counts since the start: entries ``dropped`` for want of room, announcements ``refused``."""

    entries: int
    holders: int
    dropped: int = 0
    refused: int = 0
    epoch: int = 0


class HomeIndex:
    """A :class:`Directory` in memory, of at most ``max_entries`` ids; the oldest go first, and are counted."""

    def __init__(self, max_entries: int = 1 << 20) -> None:
        if max_entries < 1:
            raise StoreError(f"a home index needs room for at least one entry, not {max_entries}; raise max_entries")
        self._max = max_entries
        self._lock = threading.Lock()
        self._entries: dict[bytes, int] = {}  # id -> bitset of holder numbers; oldest first
        self._numbers: dict[str, int] = {}
        self._fences = Fences()
        self._dropped = self._refused = 0
        self._closed = False

    def epoch(self, timeout_s: float) -> int:
        with self._lock:
            self._require_open()
            return self._fences.epoch

    def announce(self, holder: str, ids: Sequence[bytes], timeout_s: float, since: int = ALWAYS) -> int:
        require_ids(ids)
        with self._lock:
            self._require_open()
            fresh = self._fences.passed(ids, since)
            bit = 1 << self._number(holder)
            for i in bits.each(fresh):
                self._entries[ids[i]] = self._entries.get(ids[i], 0) | bit
            self._refused += len(ids) - fresh.bit_count()
            self._shrink()
            return fresh

    def withdraw(self, holder: str, ids: Sequence[bytes], timeout_s: float) -> None:
        require_ids(ids)
        with self._lock:
            self._require_open()
            number = self._numbers.get(holder)
            if number is not None:
                self._clear_bit(number, ids)

    def where(self, keys: Sequence[bytes], tags: Sequence[bytes], timeout_s: float) -> Mapping[bytes, Mapping[str, int]]:
        require_keys(keys, tags)
        with self._lock:
            self._require_open()
            names = {1 << number: name for name, number in self._numbers.items()}
            out: dict[bytes, dict[str, int]] = {}
            for tag in tags:
                found = [self._entries.get(key + tag, 0) for key in keys]
                any_of = 0
                for held in set(found):
                    any_of |= held
                out[tag] = {names[1 << n]: bits.pack([bool(held >> n & 1) for held in found]) for n in bits.each(any_of)}
            return out

    def holders(self, ids: Sequence[bytes], timeout_s: float) -> Sequence[tuple[str, ...]]:
        require_ids(ids)
        with self._lock:
            self._require_open()
            names = {number: name for name, number in self._numbers.items()}
            return [tuple(names[n] for n in bits.each(self._entries.get(id, 0))) for id in ids]

    def forget(self, prefix: bytes, timeout_s: float) -> int:
        with self._lock:
            self._require_open()
            self._fences.add(prefix)
            gone = [id for id in self._entries if id.startswith(prefix)]
            for id in gone:
                del self._entries[id]
            return len(gone)

    def leave(self, holder: str) -> int:
        """Drop everything of a holder that is gone. Returns how many ids it held."""
        with self._lock:
            number = self._numbers.pop(holder, None)
            if number is None:
                return 0
            return self._clear_bit(number, list(self._entries))

    def stats(self) -> DirectoryStats:
        with self._lock:
            return DirectoryStats(len(self._entries), len(self._numbers), self._dropped, self._refused, self._fences.epoch)

    def close(self) -> None:
        """Idempotent. Later calls raise StoreClosed."""
        with self._lock:
            self._closed = True

    def check(self) -> None:
        """Raises Inconsistent."""
        with self._lock:
            known = sum(1 << number for number in self._numbers.values())
            if len(set(self._numbers.values())) != len(self._numbers):
                raise Inconsistent("two holders share a number")
            if any(not held or held & ~known for held in self._entries.values()):
                raise Inconsistent("an entry has no holder, or one that is unknown")
            if len(self._entries) > self._max:
                raise Inconsistent("the home index is larger than its bound")

    # -- inside; the lock is held ------------------------------------------------------------------------------------------------

    def _require_open(self) -> None:
        if self._closed:
            raise StoreClosed("this home index is closed")

    def _number(self, holder: str) -> int:
        """Small numbers are used again, so that an entry stays a small int."""
        if holder not in self._numbers:
            taken = set(self._numbers.values())
            self._numbers[holder] = next(n for n in range(len(taken) + 1) if n not in taken)
        return self._numbers[holder]

    def _clear_bit(self, number: int, ids: Iterable[bytes]) -> int:
        count = 0
        for id in ids:
            held = self._entries.get(id, 0)
            if held >> number & 1:
                count += 1
                if held == 1 << number:
                    del self._entries[id]
                else:
                    self._entries[id] = held & ~(1 << number)
        return count

    def _shrink(self) -> None:
        """Several at once, as the first of a dict is slow to find after many were removed."""
        excess = len(self._entries) - self._max
        if excess > 0:
            for id in [id for id, _ in zip(self._entries, range(excess), strict=False)]:
                del self._entries[id]
            self._dropped += excess


class Fences:
    """The last ``forget`` of each prefix, as epochs. Bounded: where there are too many, the oldest counts for every prefix."""

    def __init__(self) -> None:
        self.epoch = 0
        self._floor = 0  # announcements from before this epoch are refused whatever their prefix
        self._last: dict[bytes, int] = {}  # oldest first

    def add(self, prefix: bytes) -> None:
        self.epoch += 1
        self._last.pop(prefix, None)
        self._last[prefix] = self.epoch
        if len(self._last) > _FENCES:
            self._floor = self._last.pop(next(iter(self._last)))

    def passed(self, ids: Sequence[bytes], since: int) -> int:
        """Bitset of the ids that no fence later than ``since`` stands before."""
        everything = (1 << len(ids)) - 1
        if since >= self.epoch:
            return everything
        if since < self._floor:
            return 0
        fences = tuple(prefix for prefix, epoch in self._last.items() if epoch > since)
        return bits.pack([not id.startswith(fences) for id in ids])
