"""What a put waits for when there is no free slot: a new segment, or one of another size class that is emptied for it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from hicache_ray.storage.disk_files import DiskFiles
from hicache_ray.storage.disk_index import DiskIndex
from hicache_ray.storage.disk_moves import Mover
from hicache_ray.storage.disk_plan import Plan
from hicache_ray.storage.disk_segment import Segment
from hicache_ray.storage.disk_work import Batch, Workers


class RoomMaker:
    """``lock`` guards the index; it is taken here, never held by the caller."""

    def __init__(self, files: DiskFiles, workers: Workers, mover: Mover, lock: threading.Condition, index: DiskIndex) -> None:
        self._files, self._workers, self._mover, self._lock, self._index = files, workers, mover, lock, index

    def make(self, plan: Plan, until: float) -> None:
        """Do what the plan waits for, and go on with it. Raises StoreTimeout or StoreClosed; what the plan had placed is free then, or as
        soon as nobody works for it any more."""
        made: list[Segment] = []

        def abandoned() -> None:
            with self._lock:
                self._index.grown(plan, made[0] if made else None, None)  # others use it
                self._index.abandon(plan)

        if plan.leaving is not None:
            error = self._mover.empty(plan.leaving, until, abandoned)
        else:
            error = self._grow(plan, made, until, abandoned)
        with self._lock:
            self._index.grown(plan, made[0] if made else None, error)
            self._index.proceed(plan)

    def _grow(self, plan: Plan, made: list[Segment], until: float, abandoned: Callable[[], None]) -> Exception | None:
        shape = plan.wanted
        assert shape is not None

        def job(staging: memoryview, batch: Batch) -> None:
            made.append(self._files.make(shape, staging))

        (error,) = self._workers.run([job], until, abandoned)
        return error
