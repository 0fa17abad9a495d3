"""Calls to other actors: every wait has a deadline, and an error arrives as what was raised over there, without the remote traceback."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import ray

from hicache_ray.actors import names


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
