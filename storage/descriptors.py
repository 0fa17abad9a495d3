"""What the arena's service tells its clients about places in memory: arrays, as they travel."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from hicache_ray.storage import bits

U64: TypeAlias = npt.NDArray[np.uint64]
Flags: TypeAlias = npt.NDArray[np.bool_]


class Outcome(enum.IntEnum):
    """Answer to one id of a reservation."""

    GRANTED = 0
    EXISTS = 1
    PENDING = 2
    REFUSED = 3


#: The same as plain numbers: comparing an array with the enum, or writing the enum into one, costs more than the pass over the array.
GRANTED, EXISTS, PENDING, REFUSED = (int(outcome) for outcome in Outcome)
OUTCOMES = tuple(Outcome)  # by value; calling the enum costs more than all else in its message
VOID = len(OUTCOMES)  # only of what was written to a spare slot: it is not lent any more, and somebody else's perhaps


class Grant(NamedTuple):
    """``offset``: bytes from the start of the arena's data; 0 unless GRANTED."""

    outcome: Outcome
    offset: int


@dataclass(frozen=True, eq=False)
class Reservation:
    """``outcomes``: (n,) uint8 of :class:`Outcome`, one per id; ``offsets``: (n,) uint64, 0 unless GRANTED. ``id`` 0: nothing granted."""

    id: int
    seconds: float
    outcomes: npt.NDArray[np.uint8]
    offsets: U64

    @property
    def granted(self) -> npt.NDArray[np.int64]:
        """Positions, ascending, of the granted ids: the order of a seal's checksums."""
        return np.flatnonzero(self.outcomes == GRANTED)

    @property
    def grants(self) -> list[Grant]:
        return [Grant(OUTCOMES[code], at) for code, at in zip(self.outcomes.tolist(), self.offsets.tolist(), strict=True)]


class Held(NamedTuple):
    """A reservation of one object: as :class:`Reservation`, in plain numbers."""

    id: int
    seconds: float
    outcome: int
    offset: int


class Ready(NamedTuple):
    """A spare slot: the next object whose class is ``size`` may be written at ``offset``, for ``seconds`` from when it was lent."""

    id: int
    seconds: float
    offset: int
    size: int


class Loan(NamedTuple):
    """A leased object: ``length`` bytes at ``offset`` hash to ``checksum`` while the generation word of ``offset`` is ``generation``
    (objects shorter than a block share a word; for them it says nothing)."""

    offset: int
    length: int
    checksum: int
    generation: int


@dataclass(frozen=True, eq=False)
class Lease:
    """``hit``: (n,) flags, one per id. ``table``: (hits, 4) uint64, a :class:`Loan` in each row, in the order of the ids that hit.

    ``seconds`` count from when the service granted it; a reader counts from before it asked. ``id`` 0: nothing is lent.
    """

    id: int
    seconds: float
    hit: Flags
    table: U64

    @property
    def which(self) -> npt.NDArray[np.int64]:
        """Positions, ascending, of the ids that hit: one per row of the table."""
        return np.flatnonzero(self.hit)

    @property
    def offsets(self) -> U64:
        return self.table[:, 0]

    @property
    def lengths(self) -> U64:
        return self.table[:, 1]

    @property
    def checksums(self) -> U64:
        return self.table[:, 2]

    @property
    def generations(self) -> U64:
        return self.table[:, 3]

    @property
    def loans(self) -> list[Loan | None]:
        """One per id; None where it is a miss."""
        rows = iter(self.table.tolist())
        return [Loan(*next(rows)) if hit else None for hit in self.hit.tolist()]


class Lending(NamedTuple):
    """A lease of one object: as :class:`Lease`, in plain numbers. ``loan`` None: it is a miss."""

    id: int
    seconds: float
    loan: Loan | None


@dataclass(frozen=True, eq=False)
class Sums:
    """Checksums for a seal, one per grant: ``values`` (n,) uint64, of no meaning where ``done`` (n,) is false: given up."""

    done: Flags
    values: U64

    @classmethod
    def of(cls, checksums: Sequence[int | None]) -> Sums:
        """None: given up."""
        done = np.array([checksum is not None for checksum in checksums], np.bool_)
        return cls(done, np.array([checksum or 0 for checksum in checksums], np.uint64))

    def __len__(self) -> int:
        return len(self.done)

    def listed(self) -> list[int | None]:
        return [value if done else None for value, done in zip(self.values.tolist(), self.done.tolist(), strict=True)]

    @property
    def bits(self) -> int:
        return bits.packed(self.done)
