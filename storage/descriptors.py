"""What the arena's service tells its clients about places in memory."""

from __future__ import annotations

import enum
from typing import NamedTuple


class Outcome(enum.IntEnum):
    """Answer to one id of a reservation."""

    GRANTED = 0
    EXISTS = 1
    PENDING = 2
    REFUSED = 3


class Grant(NamedTuple):
    """``offset``: bytes from the start of the arena's data; 0 unless GRANTED."""

    outcome: Outcome
    offset: int


class Reservation(NamedTuple):
    id: int
    seconds: float
    grants: list[Grant]


class Loan(NamedTuple):
    """A leased object: ``length`` bytes at ``offset`` hash to ``checksum`` while the generation word of ``offset`` is ``generation``
    (objects shorter than a block share a word; for them it says nothing)."""

    offset: int
    length: int
    checksum: int
    generation: int


class Lease(NamedTuple):
    """``seconds`` count from when the service granted it; a reader counts from before it asked. None: the object is a miss."""

    id: int
    seconds: float
    loans: list[Loan | None]
