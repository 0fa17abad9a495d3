"""Calls to other actors: every wait has a deadline, and an error arrives as what was raised over there, without the remote traceback."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from hicache_ray.actors import names
from hicache_ray.errors import ConfigError, GroupLost


def cause(error: Exception) -> Exception:
    """What a remote method has raised. Ray wraps it into an error whose text is a traceback, which is not for users."""
    if isinstance(error, ray.exceptions.RayTaskError) and isinstance(error.cause, Exception):
        return error.cause
    return error


async def answer(ref: Any, timeout_s: float) -> Any:
    """The result of a call. Raises what the method raised, RayActorError for a dead actor, asyncio.TimeoutError."""
    try:
        return await asyncio.wait_for(_ref(ref), timeout_s)
    except ray.exceptions.RayTaskError as error:
        raise cause(error) from None


async def _ref(ref: Any) -> Any:
    return await ref


def living(wanted: Any) -> Mapping[str, Any]:
    """Our named actors whose name ``wanted`` accepts, by name. Blocks for a call to Ray's control service: not for an event loop."""
    found = {}
    for entry in ray.util.list_named_actors(all_namespaces=True):
        if entry["namespace"] == names.NAMESPACE and wanted(entry["name"]):
            try:
                found[entry["name"]] = ray.get_actor(entry["name"], names.NAMESPACE)
            except ValueError:  # it died in between
                continue
    return found


async def together(actors: Sequence[Any], refs: Sequence[Any], timeout_s: float, what: str) -> list[Any]:
    """Results of calls made at once, one on each actor. When one fails or takes too long, all that have not succeeded are killed: they
    wait for it, or are in no known state. Raises :class:`GroupLost`, or the ConfigError that a method has raised."""
    calls = [asyncio.ensure_future(answer(ref, timeout_s)) for ref in refs]
    if calls:
        await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
    done = [call.done() and call.exception() is None for call in calls]
    if all(done):
        return [call.result() for call in calls]
    errors = [error for call in calls if call.done() and (error := call.exception()) is not None]
    for actor, call, well in zip(actors, calls, done, strict=True):
        if not well:
            call.cancel()
            ray.kill(actor)
    error = errors[0]
    if isinstance(error, ConfigError):
        raise error
    why = f"no answer within {timeout_s:g} s" if isinstance(error, asyncio.TimeoutError) else str(error)
    raise GroupLost(f"the cache group could not {what}: {why}") from error
