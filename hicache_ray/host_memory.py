"""Host memory for pools, every page of which exists before the first request asks for it.

The kernel zeroes each page of fresh memory when it is touched first. One core does that at a few GB/s, so threads of our own share the
work; where a thread cannot be started, fewer do it. The memory lies on the NUMA node of the threads that touch it: pin the process to the
node (``numactl --cpunodebind``), and its threads and its memory are there too.
"""

from __future__ import annotations

import mmap
import os
import threading
from typing import Any

import numpy as np

#: Threads that touch fresh memory, at most; more than the cores that we may run on are of no use.
TOUCHERS = 8
#: Less than this is not worth a thread.
LEAST = 1 << 22


def touched(size: int, threads: int | None = None, shared: bool = False) -> Any:
    """Anonymous memory of ``size`` > 0 bytes (a writable uint8 array over it), zeroed by touch: threads have taken a share each.

    ``shared``: it stays where it is when the process forks, as a device that has it mapped must be able to expect; else the kernel may use
    huge pages.
    """
    flags = mmap.MAP_ANONYMOUS | (mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE)
    out: Any = np.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=np.uint8)
    count = min(threads or min(TOUCHERS, cores()), max(1, size // LEAST))
    share = -(-size // count)
    parts = [out[at : at + share] for at in range(0, size, share)]
    begun = []
    for part in parts[1:]:
        thread = threading.Thread(target=part.fill, args=(0,), name="hicache-touch")
        try:
            thread.start()
        except RuntimeError:  # the process may not have more threads: this one does it
            part.fill(0)
        else:
            begun.append(thread)
    parts[0].fill(0)
    for thread in begun:
        thread.join()
    return out


def cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
