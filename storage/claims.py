"""Who uses bytes of the arena at the moment, and until when: open leases and open reservations."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import NamedTuple

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


class Claims:
    """Leases and holds by number. ``first_id``: numbers count from here, for both."""

    def __init__(self, clock: Callable[[], float], first_id: int) -> None:
        self.leases: dict[int, Claim] = {}
        self.holds: dict[int, Claim] = {}
        self.clock = clock
        self._next = first_id
        self._deadlines: list[tuple[float, int]] = []  # heap over both; closed ones are left to pass

    def __len__(self) -> int:
        """Deadlines that are kept: bounded by twice what is open."""
        return len(self._deadlines)

    def open(self, claims: dict[int, Claim], claim: Claim) -> int:
        """The number of a claim on something; 0 for one on nothing, which is not kept."""
        if not len(claim.rows):
            return 0
        id, self._next = self._next, self._next + 1
        claims[id] = claim
        if len(self._deadlines) > 1024 + 2 * (len(self.holds) + len(self.leases)):
            self._deadlines = [item for item in self._deadlines if item[1] in self.holds or item[1] in self.leases]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (claim.deadline, id))
        return id

    def expired(self) -> list[Claim]:
        """Claims whose deadline has passed; they are open no more."""
        if not self._deadlines or self._deadlines[0][0] > (now := self.clock()):
            return []
        out = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, id = heapq.heappop(self._deadlines)
            claim = self.leases.pop(id, None) or self.holds.pop(id, None)
            if claim is not None:
                out.append(claim)
        return out

    def of(self, owner: int) -> list[Claim]:
        """Reservations of a connection; they are open no more."""
        return [self.holds.pop(id) for id in [id for id, hold in self.holds.items() if hold.owner == owner]]

    def waiting(self) -> set[int]:
        return {id for _, id in self._deadlines}
