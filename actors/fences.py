"""Drops of namespaces that are under way in a coordinator. They outlive the incarnations of its group: what begins anew learns of them
before it serves."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from hicache_ray.actors.driver import Driver
from hicache_ray.errors import Busy, GroupLost, HiCacheError
from hicache_ray.story import Dropped


@dataclass
class Fence:
    """New requests of ``space`` wait until it is lifted, or until ``until``. ``rid``: of the group's own drop, empty while no group has
    learned of it; ``gone``: what has left L1 and L2."""

    space: bytes
    until: float
    rid: str = ""
    gone: asyncio.Future[Dropped] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Fences:
    """All methods on one event loop. ``clock``: seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._open, self._count = clock, dict[str, Fence](), 0

    async def begin(self, space: bytes, timeout_s: float, driver: Driver | None, fresh: bool) -> tuple[str, Dropped]:
        """Returns when everything of a space has left L1 and L2 and nothing of it is under way to L3: its name here, and what has left.

        A group that is lost has lost its L1 and L2, but its ranks may still write: it is waited for, until the next one has begun.
        ``fresh``: there has been none yet, so there is nothing to wait for. Raises :class:`Busy` where the space is being dropped,
        :class:`GroupLost` where nobody begins in time.
        """
        self._open = {name: fence for name, fence in self._open.items() if fence.until > self._clock()}
        if any(fence.space == space for fence in self._open.values()):
            raise Busy("this namespace is being dropped; try again when that is complete")
        self._count += 1
        name, fence = f"fence {self._count}", Fence(space, self._clock() + timeout_s)
        self._open[name] = fence
        if driver is None and fresh:
            return name, Dropped(name, 0, 0)
        try:
            return name, await self._gone(fence, driver, timeout_s)
        except BaseException:
            self._open.pop(name, None)
            raise

    async def _gone(self, fence: Fence, driver: Driver | None, timeout_s: float) -> Dropped:
        if driver is not None:
            with contextlib.suppress(GroupLost):
                gone = await driver.drop(fence.space, timeout_s)
                fence.rid = fence.rid or gone.rid
                return gone
        try:
            return await asyncio.wait_for(asyncio.shield(fence.gone), max(0.0, fence.until - self._clock()))
        except asyncio.TimeoutError:
            raise GroupLost("the cache group is lost and the next one has not begun in time; drop again") from None

    async def apply(self, driver: Driver) -> None:
        """Tell a group that has just begun, and that nobody has asked for anything yet, of all drops under way; also of those that begin
        meanwhile. When it returns the group must be the one that :meth:`begin` is given."""
        told: set[str] = set()
        while new := [(name, fence) for name, fence in self._open.items() if name not in told]:
            name, fence = new[0]
            told.add(name)
            left = fence.until - self._clock()
            if left <= 0:
                continue
            gone = await driver.drop(fence.space, left)
            if name not in self._open:  # it has ended in between
                driver.lift(gone.rid)
                continue
            fence.rid = gone.rid
            if not fence.gone.done():
                fence.gone.set_result(gone)

    def end(self, name: str, driver: Driver | None) -> None:
        """L3 is clear of it: new requests begin. Raises where it took so long that they have begun before."""
        fence = self._open.pop(name, None)
        if fence is None or fence.until <= self._clock():
            raise HiCacheError("the drop took too long and has ended by itself; drop again")
        if fence.rid and driver is not None and not driver.lost:
            driver.lift(fence.rid)
