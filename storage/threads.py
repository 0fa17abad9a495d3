"""Threads of ours: begun where the machine has one left, and waited for together."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable

log = logging.getLogger("hicache_ray.storage")


def begin(thread: threading.Thread) -> bool:
    """Start it; False, and a line in the log, where the system gives no thread now."""
    try:
        thread.start()
    except RuntimeError as error:
        log.warning("no thread %s can be had: %s", thread.name, error)
        return False
    return True


def join_all(threads: Iterable[threading.Thread], seconds: float) -> bool:
    """Wait for those that were begun, ``seconds`` at most for all of them together. Have all ended?"""
    until, ended = time.monotonic() + seconds, True
    for thread in threads:
        if thread.ident is not None and thread is not threading.current_thread():
            thread.join(max(until - time.monotonic(), 0.0))
            ended &= not thread.is_alive()
    return ended
