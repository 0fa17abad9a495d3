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
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from hicache_ray.errors import ConfigError, Inconsistent, StoreClosed, StoreError
from hicache_ray.storage import bits
from hicache_ray.storage.fences import Fences
from hicache_ray.storage.forgotten import ForgottenLog, Told
from hicache_ray.storage.ids import require_ids, require_keys
from hicache_ray.storage.table import IdTable, Rows

#: ``since`` of an announcement that no fence refuses.
ALWAYS = (1 << 63) - 1

#: Holders that are known of one id, at most.
HOLDERS = 4

Held: TypeAlias = npt.NDArray[np.uint16]


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
        """Holders of each id, in no order; empty where there is none."""
        ...

    def forget(self, prefix: bytes, timeout_s: float) -> int:
        """Remove the entries, of every holder, whose id starts with ``prefix``, and fence it. Returns how many ids went."""
        ...

    def forget_ids(self, ids: Sequence[bytes], timeout_s: float) -> int:
        """The same for single ids."""
        ...

    def forgotten(self, seconds: float, timeout_s: float) -> Sequence[tuple[bytes, float]]:
        """Prefixes and ids that this home was told to forget in the last ``seconds``, each with how long ago, the last time."""
        ...


@dataclass(frozen=True)
class DirectoryStats:
    """``entries``: ids known now, in ``bytes`` of memory. Since the start: entries ``dropped`` for want of room, announcements that were
    ``refused``, and how often what was forgotten could not be kept on the disk (``unkept``)."""

    entries: int
    holders: int
    bytes: int = 0
    dropped: int = 0
    refused: int = 0
    epoch: int = 0
    unkept: int = 0


class HomeIndex:
    """A :class:`Directory` in memory, of at most ``max_entries`` ids; those announced longest ago go first, and are counted.

    In arrays: about 130 bytes per id. Of an id that more than ``HOLDERS`` nodes have, it knows the first ones. ``log``: where what was
    forgotten is kept; it outlives this index.
    """

    def __init__(self, max_entries: int = 1 << 20, clock: Callable[[], float] = time.monotonic, log: ForgottenLog | None = None) -> None:
        if max_entries < 1:
            raise ConfigError(f"a home index needs room for at least one entry, not {max_entries}; raise max_entries")
        self._max = max_entries
        self._lock = threading.Lock()
        self._table = IdTable(columns={"holders": f"({HOLDERS},)u2", "said": "u4"})
        self._numbers: dict[str, int] = {}  # holder -> its number in the column, from 1; 0 is nobody
        self._fences = Fences()
        self._clock, self._log = clock, log
        if log is not None:
            told = log.load(clock())
            self._fences.load(told.entries, told.floor_at)
        self._calls = self._dropped = self._refused = 0
        self._closed = False

    def epoch(self, timeout_s: float) -> int:
        with self._open():
            return self._fences.epoch

    def announce(self, holder: str, ids: Sequence[bytes], timeout_s: float, since: int = ALWAYS) -> int:
        require_ids(ids)
        with self._open():
            fresh = self._fences.passed(ids, since)
            self._refused += len(ids) - fresh.bit_count()
            entered = list(dict.fromkeys(ids[i] for i in bits.each(fresh)))
            if entered:
                self._enter(self._number(holder), entered)
                self._shrink()
            return fresh

    def withdraw(self, holder: str, ids: Sequence[bytes], timeout_s: float) -> None:
        require_ids(ids)
        with self._open():
            number, rows = self._numbers.get(holder), self._table.find(ids)
            if number is not None:
                self._remove(number, np.unique(rows[rows >= 0]))

    def where(self, keys: Sequence[bytes], tags: Sequence[bytes], timeout_s: float) -> Mapping[bytes, Mapping[str, int]]:
        require_keys(keys, tags)
        with self._open():
            names = self._names()
            out: dict[bytes, dict[str, int]] = {}
            for tag in tags:
                held = self._held(self._table.find_pairs(keys, tag))
                out[tag] = {names[n]: _bitset((held == n).any(axis=1)) for n in np.unique(held).tolist() if n}
            return out

    def holders(self, ids: Sequence[bytes], timeout_s: float) -> Sequence[tuple[str, ...]]:
        require_ids(ids)
        with self._open():
            names = self._names()
            return [tuple(names[n] for n in row if n) for row in self._held(self._table.find(ids)).tolist()]

    def forget(self, prefix: bytes, timeout_s: float) -> int:
        with self._open():
            self._fences.add([prefix], self._clock())
            rows = self._table.rows(prefix)
            self._table.remove(rows)
        self._keep(timeout_s)
        return len(rows)

    def forget_ids(self, ids: Sequence[bytes], timeout_s: float) -> int:
        require_ids(ids)
        with self._open():
            self._fences.add_ids(ids, self._clock())
            rows = self._table.find(ids)
            rows = np.unique(rows[rows >= 0])
            self._table.remove(rows)
        self._keep(timeout_s)
        return len(rows)

    def forgotten(self, seconds: float, timeout_s: float) -> Sequence[tuple[bytes, float]]:
        with self._open():
            now = self._clock()
            return [(prefix, now - at) for prefix, at in self._fences.since(now - seconds)]

    def knows(self, prefixes: Sequence[bytes], seconds: float) -> int:
        """Bitset of the prefixes (or ids) that this home was told to forget in the last ``seconds``, with these words or with a shorter
        prefix."""
        with self._open():
            return self._fences.known(prefixes, self._clock() - seconds)

    def leave(self, holder: str) -> int:
        """Drop everything of a holder that is gone. Returns how many ids it held."""
        with self._lock:
            number = self._numbers.pop(holder, None)
            return 0 if number is None else self._remove(number, self._table.rows())

    def stats(self) -> DirectoryStats:
        with self._lock:
            table = self._table
            unkept = 0 if self._log is None else self._log.failures
            return DirectoryStats(len(table), len(self._numbers), table.nbytes, self._dropped, self._refused, self._fences.epoch, unkept)

    def close(self) -> None:
        """Idempotent. Later calls raise StoreClosed."""
        with self._lock:
            self._closed = True

    def check(self) -> None:
        """Raises Inconsistent."""
        with self._lock:
            self._table.check()
            held = self._held(self._table.rows())
            if len(set(self._numbers.values())) != len(self._numbers) or 0 in self._numbers.values():
                raise Inconsistent("two holders share a number, or one has nobody's")
            if not np.isin(held, [0, *self._numbers.values()]).all() or not held.any(axis=1).all():
                raise Inconsistent("an entry has no holder, or one that is unknown")
            if len(self._table) > self._max:
                raise Inconsistent("the home index is larger than its bound")

    # -- inside ------------------------------------------------------------------------------------------------------------------

    def _keep(self, timeout_s: float) -> None:
        if self._log is not None:
            self._log.save(self._fences.epoch, self._told, timeout_s / 2)  # there must be time to do without

    def _told(self) -> tuple[int, Told, float]:
        with self._lock:
            return self._fences.epoch, Told(*self._fences.everything()), self._clock()

    # -- the lock is held --------------------------------------------------------------------------------------------------------

    @contextmanager
    def _open(self) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise StoreClosed("this home index is closed")
            yield

    def _number(self, holder: str) -> int:
        """Numbers are used again."""
        if holder not in self._numbers:
            taken = set(self._numbers.values())
            number = next(n for n in range(1, len(taken) + 2) if n not in taken)
            if number >= 1 << 16:
                raise StoreError(f"a home index knows {number - 1} holders at most")
            self._numbers[holder] = number
        return self._numbers[holder]

    def _names(self) -> dict[int, str]:
        return {number: name for name, number in self._numbers.items()}

    def _held(self, rows: Rows) -> Held:
        """(n, HOLDERS) numbers of the holders; nobody where the row is -1."""
        held: Held = self._table["holders"].take(rows, 0)
        held[rows < 0] = 0
        return held

    def _enter(self, number: int, ids: Sequence[bytes]) -> None:
        rows = self._table.find(ids)
        absent = (rows < 0).nonzero()[0]
        if len(absent):
            rows[absent] = self._table.add([ids[i] for i in absent.tolist()])
            self._table["holders"][rows[absent]] = 0
        self._calls += 1
        self._table["said"][rows] = self._calls
        held = self._held(rows)
        vacant = held == 0
        new = ~(held == number).any(axis=1) & vacant.any(axis=1)
        self._table["holders"][rows[new], vacant[new].argmax(axis=1)] = number

    def _remove(self, number: int, rows: Rows) -> int:
        """One holder from some rows."""
        held = self._held(rows)
        mine = held == number
        held[mine] = 0
        self._table["holders"][rows] = held
        self._table.remove(rows[~held.any(axis=1)])
        return int(mine.any(axis=1).sum())

    def _shrink(self) -> None:
        """A sixteenth at once, as finding the oldest takes a look at all."""
        excess = len(self._table) - self._max
        if excess > 0:
            rows = self._table.rows()
            count = min(len(rows), excess + self._max // 16)
            self._table.remove(rows[np.argsort(self._table["said"][rows], kind="stable")[:count]])
            self._dropped += count


def _bitset(flags: npt.NDArray[np.bool_]) -> int:
    return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")
