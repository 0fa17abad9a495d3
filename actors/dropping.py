"""Dropping namespaces on all replicas of an application and in their storage, as one thing: first all replicas let go, then storage is
cleared, then they go on. Whatever is written or read in between is of no dropped namespace.

Replicas come and go meanwhile. Whoever begins late may have read what was being dropped, so storage is cleared only when all that there are
have let go, and once more when another one has appeared since.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from hicache_ray.actors.remote import answer
from hicache_ray.errors import Busy, HiCacheError, StorageDetached

#: How long replicas may take to let go (writes under way end by their deadlines), and storage to clear itself.
LET_GO_S = 60.0
CLEAR_S = 30.0
#: How long replicas keep new requests of the namespace back: until all have let go and storage is cleared, or until somebody has died.
HOLD_S = LET_GO_S + 2 * CLEAR_S + 10.0
#: How often replicas are looked for while one of them has no coordinator.
LOOK_S = 0.2


@dataclass(frozen=True)
class Found:
    """``coordinators``: those that live; ``headless``: replicas of which ranks live and no coordinator, so that one is about to begin."""

    coordinators: Sequence[Any]
    headless: Sequence[str] = ()


Find = Callable[[], Awaitable[Found]]


async def drop(find: Find, spaces: Sequence[str]) -> dict[str, int]:
    """Drop spaces (hex) of coordinators' groups and of L3; complete when it returns. What was removed per tier, and what is ``left``.

    Raises :class:`Busy` when one of them is being dropped, :class:`StorageDetached`, another :class:`HiCacheError` where it is not
    complete.
    """
    total = {"device": 0, "host": 0, "storage": 0, "left": 0}
    for space in spaces:
        one = _One(find, space)
        try:
            await one.run()
        except BaseException as error:
            await one.lift()
            if (told := _told(error)) is error:
                raise
            raise told from error
        if failed := await one.lift():
            raise _told(failed)
        for name, count in one.counts.items():
            total[name] += count
    return total


@dataclass
class _One:
    """The drop of one space. ``held``: the coordinators that have let go -> the name of the drop there."""

    find: Find
    space: str
    held: dict[Any, str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=lambda: {"device": 0, "host": 0, "storage": 0, "left": 0})

    async def run(self) -> None:
        until, cleared = time.monotonic() + LET_GO_S, False
        while True:
            found = await self.find()
            if late := [each for each in found.coordinators if each not in self.held]:
                await self._begin(late, max(1.0, until - time.monotonic()))
                cleared = False
            elif not found.headless:
                if cleared:
                    return
                await self._clear([each for each in found.coordinators if each in self.held])
                cleared = True
                continue
            if time.monotonic() > until:
                who = f"replica {found.headless[0]} is" if found.headless else "replicas are"
                raise HiCacheError(f"{who} being started anew and did not come up within {LET_GO_S:g} s")
            if found.headless or any(each not in self.held for each in late):
                await asyncio.sleep(LOOK_S)

    async def _begin(self, coordinators: Sequence[Any], patience_s: float) -> None:
        """Whoever dies meanwhile is looked for again, or another one in its place."""
        begun = await _all(answer(c.begin_drop.remote(self.space, HOLD_S), patience_s) for c in coordinators)
        failed: list[BaseException] = []
        for coordinator, told in zip(coordinators, begun, strict=True):
            if isinstance(told, ray.exceptions.RayActorError):
                continue
            if isinstance(told, BaseException):
                failed.append(told)
                continue
            self.held[coordinator] = told["name"]
            for tier in ("device", "host"):
                self.counts[tier] += told[tier]
        if failed:
            raise next((error for error in failed if isinstance(error, Busy)), failed[0])

    async def _clear(self, coordinators: Sequence[Any]) -> None:
        if not coordinators:
            raise HiCacheError("no replica is up any more")
        told = await answer(coordinators[0].clear_space.remote(self.space, CLEAR_S), CLEAR_S)
        self.counts["storage"] += told["storage"]
        self.counts["left"] = told["left"]

    async def lift(self) -> BaseException | None:
        """They go on. What kept one of them from holding until now; one that is dead by now holds nothing, and had let go."""
        lifted = await _all(answer(c.end_drop.remote(name), CLEAR_S) for c, name in self.held.items())
        failed = (e for e in lifted if isinstance(e, BaseException) and not isinstance(e, ray.exceptions.RayActorError))
        return next(failed, None)


async def _all(calls: Any) -> list[Any]:
    """Results or errors of all calls, made at once."""
    awaited: list[Awaitable[Any]] = list(calls)
    return await asyncio.gather(*awaited, return_exceptions=True)


def _told(error: BaseException) -> BaseException:
    if isinstance(error, Busy | StorageDetached) or not isinstance(error, (HiCacheError, ray.exceptions.RayError, asyncio.TimeoutError)):
        return error
    return HiCacheError(f"the drop is not complete: {type(error).__name__}: {error}; drop again")
