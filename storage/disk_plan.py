"""What passes between the index of a disk store and those who read and write for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from hicache_ray.storage.disk_format import Geometry
from hicache_ray.storage.disk_segment import Segment


class Found(NamedTuple):
    """A visible object, pinned."""

    id: bytes
    segment: Segment
    slot: int
    length: int
    checksum: int
    sequence: int


class Placed(NamedTuple):
    """A slot reserved for object ``number`` of the call."""

    number: int
    id: bytes
    length: int
    segment: Segment
    slot: int
    sequence: int


@dataclass
class Plan:
    """One put. What was used at ``start`` or later is not evicted for it.

    ``todo``: (number, id, length) of objects without a slot yet, the next one last. ``wanted``: the segment that must be made before
    ``proceed`` can go on; its room is taken already. ``leaving``: one that must be emptied before. ``error``: why there is no more room.
    ``capped``: tenants whose oldest went already.
    Slot sizes for which other classes were looked at: for thin segments (``compared``), for cold ones (``weighed``), in vain (``starved``).
    """

    start: int
    todo: list[tuple[int, bytes, int]]
    wanted: Geometry | None = None
    leaving: Segment | None = None
    placed: list[Placed] = field(default_factory=list)
    order: list[bytes] = field(default_factory=list)  # found and placed, in the order of the call
    visible: set[bytes] = field(default_factory=set)
    refused: int = 0
    error: Exception | None = None
    capped: set[int] = field(default_factory=set)
    compared: set[int] = field(default_factory=set)
    weighed: set[int] = field(default_factory=set)
    starved: set[int] = field(default_factory=set)
