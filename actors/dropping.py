"""Dropping namespaces on all replicas of an application and in their storage, as one thing: first all replicas let go, then storage is
cleared, then they go on. Whatever is written or read in between is of no dropped namespace."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

import ray

from hicache_ray.actors.remote import answer
from hicache_ray.errors import Busy, HiCacheError

#: How long replicas may take to let go (writes under way end by their deadlines), and storage to clear itself.
LET_GO_S = 60.0
CLEAR_S = 30.0
#: How long replicas keep new requests of the namespace back: until all have let go and storage is cleared, or until somebody has died.
HOLD_S = LET_GO_S + CLEAR_S + 10.0


async def drop(replicas: Mapping[str, Any], spaces: Sequence[str]) -> dict[str, int]:
    """Drop spaces (hex) of coordinators' groups and of L3; complete when it returns. What was removed per tier, and what is ``left``.

    Raises :class:`Busy` when one of them is being dropped, another :class:`HiCacheError` where it is not complete.
    """
    total = {"device": 0, "host": 0, "storage": 0, "left": 0}
    for space in spaces:
        for name, count in (await _drop_one(list(replicas.values()), space)).items():
            total[name] += count
    return total


async def _drop_one(coordinators: Sequence[Any], space: str) -> dict[str, int]:
    begun = await _all(answer(c.begin_drop.remote(space, HOLD_S), LET_GO_S) for c in coordinators)
    cleared: Any = None
    if not any(isinstance(told, BaseException) for told in begun):
        (cleared,) = await _all([answer(coordinators[0].clear_space.remote(space, CLEAR_S), CLEAR_S)])
    held = [(c, told["name"]) for c, told in zip(coordinators, begun, strict=True) if not isinstance(told, BaseException)]
    lifted = await _all(answer(c.end_drop.remote(name), CLEAR_S) for c, name in held)
    for outcome in (*begun, cleared, *lifted):
        if isinstance(outcome, BaseException):
            raise _told(outcome)
    counts: dict[str, int] = cleared
    return {"device": sum(told["device"] for told in begun), "host": sum(told["host"] for told in begun), **counts}


async def _all(calls: Any) -> list[Any]:
    """Results or errors of all calls, made at once."""
    awaited: list[Awaitable[Any]] = list(calls)
    return await asyncio.gather(*awaited, return_exceptions=True)


def _told(error: BaseException) -> BaseException:
    if isinstance(error, Busy) or not isinstance(error, (HiCacheError, ray.exceptions.RayError, asyncio.TimeoutError)):
        return error
    return HiCacheError(f"the drop is not complete: {type(error).__name__}: {error}; drop again")
