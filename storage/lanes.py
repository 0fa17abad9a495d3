"""Threads that wait on other nodes, a few per node and no more: a node that hangs keeps its own lane busy and nobody else's."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

from hicache_ray.errors import StoreClosed
from hicache_ray.storage.connection import Overloaded
from hicache_ray.storage.threads import begin, join_all

T = TypeVar("T")


class Lane:
    """Runs calls on at most ``workers`` threads of its own, started when needed; at most ``queued`` more calls wait for one."""

    def __init__(self, name: str, workers: int, queued: int = 64) -> None:
        self._name, self._workers, self._queued = name, workers, queued
        self._lock = threading.Condition()
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._closed = False

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Raises Overloaded where all threads are busy and the queue is full, StoreClosed after ``close``."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise StoreClosed("this handle of the store is closed")
            if len(self._calls) >= self._queued:
                raise Overloaded(f"{self._name}: all {self._workers} threads wait for it, and {self._queued} calls for them")
            self._calls.append((future, call))
            if self._idle >= len(self._calls):
                self._lock.notify()
            elif len(self._threads) < self._workers:
                thread = threading.Thread(target=self._run, name=f"hicache-{self._name}-{len(self._threads)}", daemon=True)
                if begin(thread):
                    self._threads.append(thread)
                elif not self._threads:
                    self._calls.pop()
                    raise Overloaded(f"{self._name}: the system gives no thread that could wait for it")
        return future

    def close(self, timeout_s: float) -> None:
        """Idempotent. What has not begun is cancelled; what has is waited for, ``timeout_s`` seconds at most."""
        with self._lock:
            self._closed = True
            for future, _ in self._calls:
                future.cancel()
            self._calls.clear()
            self._lock.notify_all()
            threads = [thread for thread in self._threads if thread is not threading.current_thread()]
        join_all(threads, timeout_s)

    @staticmethod
    def close_all(lanes: Iterable[Lane], timeout_s: float) -> None:
        """Several within the time of one."""
        waiting, until = list(lanes), time.monotonic() + timeout_s
        for lane in waiting:
            lane.close(0.0)
        for lane in waiting:
            lane.close(max(until - time.monotonic(), 0.0))

    def busy(self) -> bool:
        """Is any of its threads alive?"""
        with self._lock:
            return any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (work := self._next()) is not None:
            future, call = work
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = call()
            except BaseException as error:  # the caller's to see: the thread lives on
                future.set_exception(error)
            else:
                future.set_result(result)
                del result  # nothing of a call outlives it here, however long the next one is in coming
            del work, future, call

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        with self._lock:
            self._idle += 1
            while not self._calls and not self._closed:
                self._lock.wait()
            self._idle -= 1
            return self._calls.popleft() if self._calls else None
