"""What a story is made of: what it waits for, what it is asked, what it tells.

A story is a generator. It yields a record (or a :class:`Wait`, a :class:`Pause`) and is resumed with what all ranks reported
(:class:`Merged`); whoever drives it (:class:`hicache_ray.group.Group`) performs nothing itself either. A story can be cancelled wherever it
waits: it sees :class:`~hicache_ray.errors.Cancelled` at that point, after the record in flight has completed, and gives back what it holds.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from hicache_ray.keys import Namespace, space_of
from hicache_ray.lease import Lease
from hicache_ray.records import Embedded, Merged, Record, Tokens
from hicache_ray.resume import Limit, Path, Plan
from hicache_ray.why import Evidence


class Wait(Enum):
    """What a story may wait for beside a record."""

    ENGINE = "its turn on the device"
    CHANGE = "something in flight to complete"
    ARRIVAL = "pages on their way from storage; it ends with an answer that is late"
    ROOM = "host memory that others use; it ends with an answer that is late"
    WRITES = "writes to storage under way to end"
    QUIET = "all requests and backups to end"
    HOLD = "its caller"


@dataclass(frozen=True)
class Pause:
    """A wait of which the story itself says how long it may take: ``until``, on the group's clock."""

    wait: Wait
    until: float


Story: TypeAlias = Generator["Record | Wait | Pause", Merged, None]
#: component -> base page index that the page or snapshot ends with -> digest on each rank
PageDigests: TypeAlias = Mapping[str, Mapping[int, tuple[str, ...]]]


@dataclass(frozen=True)
class Request:
    """One prompt. ``limit``: the caller's own cap on the resumed length, in tokens. ``digests``: report those of all it uses and makes.
    ``spans``: what is embedded in the prompt. ``priority``: its pages are to stay longer where the policy is ``priority``. ``ttl_s``: for
    so many seconds after a use somebody may need them; later they go first. Hints, both."""

    rid: str
    tokens: Tokens
    namespace: Namespace
    new_tokens: int = 1
    limit: int | None = None
    digests: bool = False
    spans: tuple[Embedded, ...] = ()
    priority: int = 0
    ttl_s: float | None = None


@dataclass(frozen=True)
class Sampled:
    """Event: tokens that a running request has produced."""

    rid: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class Report:
    """How a request was served. ``device + host + storage + computed`` is the length of the prompt, in tokens.

    ``digests``, where asked for: of all pages and snapshots of the path that are on the device when the request ends. What it resumed from
    is among them, held since it was restored; they are taken after the last token, so that they delay none.
    """

    device: int
    host: int
    storage: int
    computed: int
    limit: Limit
    digests: PageDigests = field(default_factory=dict)


@dataclass(frozen=True)
class Ended:
    """Event: a story is over, well (``report`` of a request) or not. ``job``: of a request, for those who ask why it went as it did."""

    rid: str
    report: Report | None = None
    error: Exception | None = None
    job: Job | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Dropped:
    """Event: everything of a space has left L1 and L2 and, where ``storage`` is told, L3; nothing of it is under way to any of them.
    In pages and snapshots (of one rank), in L3 in objects."""

    rid: str
    device: int
    host: int
    storage: int | None = None


Event: TypeAlias = Sampled | Ended | Dropped


class Phase(str, Enum):
    """Where a request is, for those who ask."""

    QUEUED = "queued"
    LOOKUP = "lookup"
    FETCHING = "fetching"
    DECLINED = "declined"
    READY = "ready"
    LOADING = "loading"
    RUNNING = "running"
    DONE = "done"


@dataclass
class Job:
    """A request under way: what the stages have found out, and what it holds. ``path``: its keys; which objects are meant is a match's.

    ``era``: of the residency when it began. ``wanted``: pages of the resume that is being fetched; ``deadline``: until when, on the
    group's clock, decided once; ``patience_s``: how long that may be at most. ``fork``: the length where a state is kept because it leaves
    a cached path soon after (0: nowhere). ``told``: what L3 has said. ``evidence``: of the plan; ``resumed``: what it has come to, with the
    tier that each page came from.
    """

    request: Request
    path: Path
    allowed: int
    era: int = 0
    phase: Phase = Phase.QUEUED
    promised: int = 0
    wanted: int = 0
    deadline: float | None = None
    fork: int = 0
    limit: Limit = Limit.NONE
    leases: list[Lease] = field(default_factory=list)
    storage_pages: set[tuple[str, int]] = field(default_factory=set)
    told: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    patience_s: float = math.inf
    evidence: Evidence | None = None
    resumed: Plan | None = None

    @property
    def space(self) -> bytes:
        """The space of its namespace."""
        return space_of(self.path.keys[0] if self.path.keys else self.request.namespace.digest())
