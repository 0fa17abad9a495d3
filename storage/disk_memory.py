"""The memory that direct reads and writes go through.

A device moves one stretch of physical memory after another: of 1 MiB in a huge page one, of 1 MiB in small pages as many as the system's
free memory is in pieces, 256 at worst. Bare direct reads into the former were measured at up to twice the speed of those into the latter.
"""

from __future__ import annotations

import mmap

import numpy as np

from hicache_ray.storage.segment import HUGE

MADV_WIPEONFORK = 18  # linux 4.14


def staging_memory(size: int) -> memoryview:
    """``size`` bytes, a multiple of pages. Raises OSError.

    From HUGE bytes on it starts at a multiple of HUGE and lies in huge pages, as far as it fills them and the system has them to give.
    """
    memory = _huge(size) if size >= HUGE else None
    return memoryview(mmap.mmap(-1, size)) if memory is None else memory


def _huge(size: int) -> memoryview | None:
    """None where the system has no such memory.

    Only private memory has huge pages for the asking. But where the process forks while the device reads into it, one of the two goes on
    with a copy of a page, and it may be the reader (open(2), of O_DIRECT). So a child gets zeros, and the reader keeps its pages.
    """
    mapped = mmap.mmap(-1, size + HUGE - mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -int(np.frombuffer(mapped, np.uint8).ctypes.data) % HUGE
    try:
        mapped.madvise(MADV_WIPEONFORK)
        mapped.madvise(mmap.MADV_HUGEPAGE, start, size // HUGE * HUGE)
    except OSError:
        return None
    return memoryview(mapped)[start : start + size]
