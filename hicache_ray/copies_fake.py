"""A device without a device: two queues in virtual time, so that work which no fence holds back is done too early every time.

For tests. The pools are plain memory. Work waits in its queue until somebody looks; then the queues run against each other, each piece of
work taking as long as ``delay`` says and touching its bytes at the *end* of that time. Nothing depends on threads or on a clock.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import RLock, current_thread
from typing import TypeAlias

from hicache_ray.copies_jobs import Pages
from hicache_ray.copies_queues import Queue
from hicache_ray.errors import HiCacheError

#: How long a piece of work takes, in seconds of virtual time: of this queue, with this label.
Delay: TypeAlias = Callable[[Queue, str], float]


@dataclass
class FakeEvent:
    """``time``: when it happened."""

    time: float | None = None


@dataclass
class Work:
    """What stands in a queue: something to do, an event to happen, or an event to wait for. It cannot begin before ``since``."""

    since: float
    label: str = ""
    act: Callable[[], None] | None = None
    marks: FakeEvent | None = None
    waits: FakeEvent | None = None


@dataclass(frozen=True)
class Done:
    """What a queue has done, and when it began and ended."""

    begin: float
    end: float
    queue: Queue
    label: str


@dataclass
class _Line:
    free: float = 0.0
    work: deque[Work] = field(default_factory=deque)


def copy_runs(pages: Pages) -> None:
    """Run after run, as a copy engine is told to."""
    for job in pages.jobs():
        for source, target, size in zip(*job.runs(), strict=True):
            ctypes.memmove(int(target), int(source), int(size))


class FakeDevice:
    """``copy_now`` moves the bytes of a copy when its time has come. Safe to use from several threads.

    ``log``: what was done, in the order of its ends. ``joins``: who waited for an event, by the thread's name. ``errors``: of work.
    """

    def __init__(self, delay: Delay, copy_now: Callable[[Pages], None] = copy_runs) -> None:
        self.now = 0.0
        self.log: list[Done] = []
        self.joins: list[str] = []
        self.errors: list[Exception] = []
        self._delay = delay
        self._copy_now = copy_now
        self._lines = {queue: _Line() for queue in Queue}
        self._lock = RLock()

    def enqueue(self, queue: Queue, act: Callable[[], None], label: str) -> None:
        """Work that touches bytes when it is its turn."""
        with self._lock:
            self._lines[queue].work.append(Work(self.now, label, act=act))

    # -- what hicache_ray.copies_queues.Device asks for ---------------------------------------------------------------------------------

    def copy(self, pages: Pages, label: str) -> None:
        self.enqueue(Queue.COPY, lambda: self._copy_now(pages), label)

    def mark(self, queue: Queue) -> FakeEvent:
        event = FakeEvent()
        with self._lock:
            self._lines[queue].work.append(Work(self.now, marks=event))
        return event

    def wait(self, queue: Queue, event: FakeEvent) -> None:
        with self._lock:
            self._lines[queue].work.append(Work(self.now, waits=event))

    def done(self, event: FakeEvent) -> bool:
        with self._lock:
            self._pass()
            return event.time is not None

    def join(self, event: FakeEvent, timeout_s: float) -> bool:
        self.joins.append(current_thread().name)
        with self._lock:
            while not self.done(event):
                if not self._run_one():
                    return False
        return True

    def accept(self, address: int) -> None:
        """Any memory will do."""

    def close(self) -> None:
        self.settle()

    # -- virtual time -------------------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Do everything. Raises what work raised, and :class:`HiCacheError` when the queues wait for each other."""
        with self._lock:
            while self._run_one():
                pass
            if any(line.work for line in self._lines.values()):
                raise HiCacheError("the queues wait for each other")
        if self.errors:
            raise self.errors[0]

    def _pass(self) -> None:
        """Let events happen, and waits end, that nothing stands before."""
        moved = True
        while moved:
            moved = False
            for line in self._lines.values():
                while line.work and line.work[0].act is None:
                    first = line.work[0]
                    if first.waits is not None and first.waits.time is None:
                        break
                    line.free = max(line.free, first.since, first.waits.time or 0.0 if first.waits is not None else 0.0)
                    if first.marks is not None:
                        first.marks.time = line.free
                    line.work.popleft()
                    moved = True

    def _run_one(self) -> bool:
        """The work that ends first is done; False where there is none that can begin."""
        self._pass()
        ready = []
        for queue, line in self._lines.items():
            if line.work and line.work[0].act is not None:
                begin = max(line.free, line.work[0].since)
                ready.append((begin + self._delay(queue, line.work[0].label), begin, queue))
        if not ready:
            return False
        end, begin, queue = min(ready, key=lambda item: item[0])
        line = self._lines[queue]
        work = line.work.popleft()
        line.free = end
        self.now = max(self.now, end)
        assert work.act is not None
        try:
            work.act()
        except Exception as error:  # whatever a test's work raises: its caller has long gone on
            self.errors.append(error)
        self.log.append(Done(begin, end, queue, work.label))
        self._pass()
        return True
