"""Who uses bytes of the arena at the moment, and until when: open leases and open reservations."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

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


class Claims:
    """Leases and holds by number. ``first_id``: numbers count from here, for both."""

    def __init__(self, clock: Callable[[], float], first_id: int) -> None:
        self.leases: dict[int, AnyClaim] = {}
        self.holds: dict[int, AnyClaim] = {}
        self.clock = clock
        self._next = first_id
        self._deadlines: list[tuple[float, int]] = []  # heap over both; closed ones are left to pass

    def __len__(self) -> int:
        """Deadlines that are kept: bounded by twice what is open."""
        return len(self._deadlines)

    def open(self, claims: dict[int, AnyClaim], claim: Claim) -> int:
        """The number of a claim on something; 0 for one on nothing, which is not kept."""
        return self.open_one(claims, claim) if len(claim.rows) else 0

    def open_one(self, claims: dict[int, AnyClaim], claim: AnyClaim) -> int:
        """:meth:`open` of a claim on something."""
        id, self._next = self._next, self._next + 1
        claims[id] = claim
        if len(self._deadlines) > 1024 + 2 * (len(self.holds) + len(self.leases)):
            self._deadlines = [item for item in self._deadlines if item[1] in self.holds or item[1] in self.leases]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (claim.deadline, id))
        return id

    def due(self) -> bool:
        """Has a deadline passed? Of a claim that is closed already, perhaps."""
        return bool(self._deadlines) and self._deadlines[0][0] <= self.clock()

    def expired(self) -> list[AnyClaim]:
        """Claims whose deadline has passed; they are open no more."""
        out, now = list[AnyClaim](), self.clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, id = heapq.heappop(self._deadlines)
            claim = self.leases.pop(id, None) or self.holds.pop(id, None)
            if claim is not None:
                out.append(claim)
        return out

    def of(self, owner: int) -> list[AnyClaim]:
        """Reservations of a connection; they are open no more."""
        return [self.holds.pop(id) for id in [id for id, hold in self.holds.items() if hold.owner == owner]]

    def waiting(self) -> set[int]:
        return {id for _, id in self._deadlines}
