"""What a replica tells its coordinator: what the group is, that an incarnation begins, a request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hicache_ray.config import Config
from hicache_ray.keys import Namespace
from hicache_ray.records import Embedded
from hicache_ray.spec import CacheSpec


@dataclass(frozen=True)
class GroupSetup:
    """What a coordinator needs to know of its group. ``socket``: of the arena, empty for none. ``tenants``: the namespace of each.
    ``first``: no incarnation has been before, so nothing of one can be under way."""

    config: Config
    spec: CacheSpec
    namespace: Namespace
    socket: str
    tenants: Mapping[str, Namespace] = field(default_factory=dict)
    first: bool = True


@dataclass(frozen=True)
class Prompt:
    """A request as the replica passes it on. ``tenant``: whose it is, from trusted code; None: the deployment's own namespace.
    ``spans``: what is embedded in the tokens. ``limit``: most tokens of it that may come from the cache. ``priority``, ``ttl_s``: hints for
    eviction (:class:`hicache_ray.story.Request`)."""

    rid: str
    tokens: Sequence[int]
    new_tokens: int
    digests: bool = False
    tenant: str | None = None
    spans: tuple[Embedded, ...] = ()
    limit: int | None = None
    priority: int = 0
    ttl_s: float | None = None


@dataclass(frozen=True)
class Joined:
    """A rank has joined an incarnation. ``attached``: whether it has storage; one that has lost it keeps away from it."""

    pid: int
    attached: bool


@dataclass(frozen=True)
class Begun:
    """A new incarnation. ``recipe``: of the canonical bytes, which the ranks' engine tells; ``pids``: the ranks' processes; ``why``: what
    ended the one before, empty for the first; ``attached``: whether all ranks have storage: it was not taken away before."""

    incarnation: int = 0
    recipe: Mapping[str, str] = field(default_factory=dict)
    pids: tuple[int, ...] = ()
    why: str = ""
    attached: bool = True


def unknown_tenant(name: str, known: Iterable[str]) -> str:
    """The sentence about a tenant that is not configured."""
    there = ", ".join(known) or "none (see tenants in the configuration)"
    return f'there is no tenant "{name}"; the tenants of this deployment are: {there}'
