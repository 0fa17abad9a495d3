"""What a disk store keeps beside its objects: descriptions, a log of what was to be forgotten, and as of when all of that was heard of.

Each is written by a job of the store's workers, whose caller may have left when it is done: so one job of a kind at a time, and what a job
writes is no older than what is there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from hicache_ray.storage.disk_files import DiskFiles
from hicache_ray.storage.disk_io import DiskOs
from hicache_ray.storage.disk_log import DiskLog
from hicache_ray.storage.disk_work import Batch, Job


class Notes:
    """``sync``: what was written survives a loss of power. ``kept``: is there room for the log?"""

    def __init__(self, port: DiskOs, files: DiskFiles, directory: str, sync: bool, kept: bool) -> None:
        """Raises OSError."""
        self._files, self._log, self._kept = files, DiskLog(port, directory, sync), kept
        self._describing, self._logging, self._hearing = threading.Lock(), threading.Lock(), threading.Lock()
        #: What an earlier store kept there, and when; None where it kept nothing.
        self.log = self._log.read() if kept else None

    def begin(self, objects: int) -> float:
        """As :attr:`DiskStore.away_s` of a store that has found so many objects. What is written does not say it: a node may write before
        it has asked. Raises OSError."""
        now, heard = time.time(), self._log.heard_at() if self._kept else None
        since = now
        if objects:
            since = self._files.written_at if heard is None else heard
            since = since if since <= now else 0.0
        if self._kept and since != heard:
            self._log.begin(since)
        return now - since

    def descriptions(self, claim: Callable[[], bytes | None]) -> Job:
        """Writes what ``claim`` returns when it is its turn: so the last one is the newest. None: there is no room."""

        def keep(staging: memoryview, batch: Batch) -> None:
            with self._describing:  # bounded as the calls in it are; the caller has a deadline
                data = claim()
                if data is not None:
                    self._files.keep_descriptions(data)

        return keep

    def forgotten(self, data: bytes) -> Job:
        """Replaces the log."""

        def keep(staging: memoryview, batch: Batch) -> None:
            with self._logging:  # bounded as the calls in it are; the caller has a deadline
                with batch.touching():  # whoever has left may have a successor, who was here before
                    pass
                self._log.replace(data)

        return keep

    def heard(self, at: float) -> Job:
        """``at``: of time.time()."""

        def say(staging: memoryview, batch: Batch) -> None:
            if self._hearing.acquire(blocking=False):  # one that hangs is enough
                try:
                    self._log.hear(at)
                finally:
                    self._hearing.release()

        return say
