"""Threads that read and write for the disk store, so that no caller hangs where the disk does.

A batch of jobs runs on at most ``threads`` threads, each with its own aligned staging buffer. Callers' buffers are touched only through the
batch's gate: when a deadline passes the gate closes, the caller leaves, and a job that still waits for the disk can harm only staging.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from hicache_ray.errors import StoreTimeout
from hicache_ray.storage.connection import Overloaded
from hicache_ray.storage.disk_memory import staging_memory
from hicache_ray.storage.lanes import Lane

_QUEUE = 64  # calls that may wait, roughly: behind a disk that hangs, the next are refused at once

#: ``job(staging, batch)``. Raises OSError where the disk refuses.
Job = Callable[[memoryview, "Batch"], None]


class Abandoned(Exception):
    """The caller has left; the job must not touch its buffers."""


class Batch:
    """Jobs of one call, and the gate to the caller's buffers."""

    def __init__(self, jobs: Sequence[Job], workers: int) -> None:
        self.errors: list[Exception | None] = [None] * len(jobs)
        self._todo = iter(enumerate(jobs))  # shared: next() of one iterator is atomic
        self._changed = threading.Condition()
        self._running, self._inside, self._open = workers, 0, True
        self._finally: Callable[[], None] | None = None

    @contextmanager
    def touching(self) -> Iterator[None]:
        """While inside, the caller stays. Raises Abandoned where it has left."""
        with self._changed:
            if not self._open:
                raise Abandoned
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def work(self, staging: memoryview) -> None:
        """What each thread of the batch does."""
        try:
            for i, job in self._todo:
                try:
                    if not self._open:
                        raise Abandoned
                    job(staging, self)
                except Exception as error:
                    self.errors[i] = error
        finally:
            self.leave()

    def leave(self) -> None:
        """A thread is done."""
        with self._changed:
            self._running -= 1
            last = self._finally if not self._running else None
            self._changed.notify_all()
        if last is not None:
            last()

    def wait(self, seconds: float) -> bool:
        """True when all is done; else the gate is closed, and nobody touches the caller's buffers any more."""
        with self._changed:
            if self._changed.wait_for(lambda: not self._running, max(seconds, 0.0)):
                return True
            self._open = False
            self._changed.wait_for(lambda: not self._inside)  # bounded: a copy of memory
            return not self._running

    def when_idle(self, then: Callable[[], None]) -> None:
        """Call ``then`` once, when no thread works on the batch any more: now, or on the last thread."""
        with self._changed:
            if self._running:
                self._finally = then
                return
        then()


class Workers:
    """``threads`` threads, started as needed, and as many staging buffers of ``staging_bytes``."""

    def __init__(self, threads: int, staging_bytes: int) -> None:
        self._threads, self.staging_bytes = threads, staging_bytes
        self._local = threading.local()
        self._lane = Lane("disk", threads, _QUEUE * threads)

    def run(self, jobs: Sequence[Job], until: float, abandoned: Callable[[], None] = lambda: None) -> list[Exception | None]:
        """Do the jobs by ``until`` (of time.monotonic); returns the error of each.

        Raises StoreTimeout or StoreClosed; ``abandoned()`` is called then, as soon as no thread works on the batch.
        """
        left = min(self._threads, len(jobs))
        batch = Batch(jobs, left)
        try:
            while left:
                left -= 1
                self._submit(batch)
            if not batch.wait(until - time.monotonic()):
                raise StoreTimeout("the disk did not answer within the deadline")
            if any(True for _ in batch._todo):
                raise StoreTimeout("too many calls wait for the disk, or there is no memory to read and write through")
        except BaseException:
            for _ in range(left):
                batch.leave()
            batch.when_idle(abandoned)
            raise
        for error in batch.errors:
            if error is not None and not isinstance(error, (OSError, Abandoned)):
                batch.when_idle(abandoned)
                raise error
        return batch.errors

    def close(self, timeout_s: float) -> bool:
        """Waits for the calls of the operating system that are under way; False where one of them hangs still."""
        self._lane.close(timeout_s)
        return not self._lane.busy()

    def _submit(self, batch: Batch) -> None:
        """Where the queue is full, the batch has one thread less. Raises StoreClosed."""
        try:
            self._lane.submit(lambda: self._work(batch))
        except Overloaded:
            batch.leave()
        except BaseException:
            batch.leave()
            raise

    def _work(self, batch: Batch) -> None:
        if not hasattr(self._local, "staging"):
            try:
                self._local.staging = staging_memory(self.staging_bytes)
            except (OSError, MemoryError):
                batch.leave()
                return
        batch.work(self._local.staging)
