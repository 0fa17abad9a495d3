"""Who uses bytes of the arena at the moment, and until when: open leases, open reservations, and slots kept for the next put."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from hicache_ray.storage.table import Rows

_NONE, _NO_SERIALS = np.zeros(0, np.int64), np.zeros(0, np.int32)


class Claim(NamedTuple):
    """An open lease, or the open reservation of connection ``owner``. ``rows``: what it pins.

    Of a reservation: ``order``, all visible or reserved rows of that call, with the ``serials`` that they had; ``size``, bytes of rows.
    """

    deadline: float
    owner: int
    rows: Rows
    order: Rows = _NONE
    serials: npt.NDArray[np.int32] = _NO_SERIALS
    size: int = 0

    @property
    def row(self) -> int:
        """The only one of the rows; -1 where there are several."""
        return self.rows.item(0) if len(self.rows) == 1 else -1


class OneClaim(NamedTuple):
    """A claim on one row, in plain numbers. ``serial`` None: it is a lease."""

    deadline: float
    owner: int
    row: int
    serial: int | None = None
    size: int = 0

    @property
    def rows(self) -> Rows:
        return np.array([self.row], np.int64)

    @property
    def order(self) -> Rows:
        return _NONE if self.serial is None else self.rows

    @property
    def serials(self) -> npt.NDArray[np.int32]:
        return _NO_SERIALS if self.serial is None else np.array([self.serial], np.int32)


AnyClaim: TypeAlias = Claim | OneClaim
Removal: TypeAlias = "bytes | frozenset[bytes]"  # a prefix, or ids


class Spare(NamedTuple):
    """A slot of class ``size`` at ``offset`` that connection ``owner`` fills without a reservation. ``tick``: when it was lent last.
    ``removals``: what was removed since it was taken, the last ones: each raised the generation word of the slot by one."""

    deadline: float
    owner: int
    offset: int
    size: int
    tick: int
    removals: deque[Removal]


_Claim = TypeVar("_Claim", bound="AnyClaim | Spare")


class Claims:
    """Leases, holds and spares by number. ``first_id``: numbers count from here, for all."""

    def __init__(self, clock: Callable[[], float], first_id: int) -> None:
        self.leases: dict[int, AnyClaim] = {}
        self.holds: dict[int, AnyClaim] = {}
        self.spares: dict[int, Spare] = {}
        self.clock = clock
        self._next = first_id
        self._deadlines: list[tuple[float, int]] = []  # heap over all; closed ones are left to pass

    def __len__(self) -> int:
        """Deadlines that are kept: bounded by twice what is open."""
        return len(self._deadlines)

    def open(self, claims: dict[int, AnyClaim], claim: Claim) -> int:
        """The number of a claim on something; 0 for one on nothing, which is not kept."""
        return self.open_one(claims, claim) if len(claim.rows) else 0

    def open_one(self, claims: dict[int, _Claim], claim: _Claim) -> int:
        """:meth:`open` of a claim on something."""
        id, self._next = self._next, self._next + 1
        claims[id] = claim
        if len(self._deadlines) > 1024 + 2 * (len(self.holds) + len(self.leases) + len(self.spares)):
            open_ids = self.holds.keys() | self.leases.keys() | self.spares.keys()
            self._deadlines = [item for item in self._deadlines if item[1] in open_ids]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (claim.deadline, id))
        return id

    def due(self) -> bool:
        """Has a deadline passed? Of a claim that is closed already, perhaps."""
        return bool(self._deadlines) and self._deadlines[0][0] <= self.clock()

    def expired(self) -> list[AnyClaim | Spare]:
        """Claims whose deadline has passed; they are open no more."""
        out, now = list[AnyClaim | Spare](), self.clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, id = heapq.heappop(self._deadlines)
            claim = self.leases.pop(id, None) or self.holds.pop(id, None) or self.spares.pop(id, None)
            if claim is not None:
                out.append(claim)
        return out

    def of(self, owner: int) -> list[AnyClaim | Spare]:
        """What a connection writes to, or may; it is open no more."""
        holds = [id for id, hold in self.holds.items() if hold.owner == owner]
        spares = [id for id, spare in self.spares.items() if spare.owner == owner]
        return [*map(self.holds.pop, holds), *map(self.spares.pop, spares)]

    def waiting(self) -> set[int]:
        return {id for _, id in self._deadlines}
