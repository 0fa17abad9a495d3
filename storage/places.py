"""Places in the arena that another process named: checked against the mapping before they become addresses."""

from __future__ import annotations

import numpy as np

from hicache_ray.storage.descriptors import U64, Flags, Lease
from hicache_ray.storage.segment import Segment
from hicache_ray.storage.slabs import BLOCK, SHARES_WORD
from hicache_ray.storage.wire import WireError


def require_inside(offsets: U64, lengths: U64, memory: Segment) -> None:
    """What is outside of the mapping is not copied to or from, whoever says so. Raises WireError."""
    size = memory.data_bytes
    if not ((lengths <= size) & (offsets <= size - lengths)).all():  # where the difference wraps, the first half is False
        raise WireError(f"the service names memory outside of its segment of {size} bytes")


def unchanged(lease: Lease, memory: Segment) -> Flags:
    """Has the memory of each loan not been given away since? One flag per row of the table; see :meth:`Segment.unchanged`."""
    words = np.frombuffer(memory.generations, np.uint64)
    same: Flags = words[lease.offsets.view(np.int64) // BLOCK] == lease.generations
    return same | (lease.lengths <= SHARES_WORD)
