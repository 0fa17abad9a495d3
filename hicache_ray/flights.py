"""What a group keeps of its stories and of the records that its ranks execute; and one outcome for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from hicache_ray.errors import GroupLost
from hicache_ray.keys import space_of
from hicache_ray.lease import Lease
from hicache_ray.records import Lane, Merged, Move, Outcome, Record, lane_of
from hicache_ray.spec import Tier
from hicache_ray.story import Job, Story, Wait

#: The "rank" that answers questions about L3 as a whole.
STORE = -1


@dataclass(frozen=True)
class Envelope:
    """One record for one rank (or :data:`STORE`), of one incarnation of the group."""

    rank: int
    record: Record
    incarnation: int


@dataclass
class Tale:
    """A story under way. ``kind``: request, prefetch, evict, backup, flush or drop.

    ``deadline``: of its present wait; of a flush or a drop, of all that it does before it clears L3. ``seen``: room on the host when it
    began to wait for some.
    """

    name: str
    kind: str
    story: Story
    job: Job | None = None
    waits: Wait | Record | None = None
    started: bool = False
    cancelled: bool = False
    deadline: float | None = None
    seen: tuple[int, ...] = ()


@dataclass
class Flight:
    """A record that the ranks are executing, for a story or for whoever wants to hear of it (``landed``). Neither is there any more once
    they went on without it. ``begun``: when, on the group's clock.
    """

    record: Record
    tale: Tale | None
    ranks: tuple[int, ...]
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    deadline: float | None = None
    leases: list[Lease] = field(default_factory=list)
    landed: Callable[[Merged], None] | None = None
    begun: float = 0.0

    @property
    def awaited(self) -> bool:
        """Whether anybody waits for its outcome."""
        return self.tale is not None or self.landed is not None

    @property
    def of_storage(self) -> bool:
        """Whether L3 has a part in it."""
        return lane_of(self.record) in (Lane.ASK, Lane.STORAGE)

    def writes(self, space: bytes = b"") -> bool:
        """Whether it stores objects, with ``space``: of that."""
        record = self.record
        if not isinstance(record, Move) or record.target is not Tier.STORAGE:
            return False
        return not space or any(space_of(key) == space for span in record.spans for key in span.keys)

    def cut_short(self, why: str) -> Merged:
        """What its story is told when it goes on without those who have not reported."""
        none = Outcome(bits=(0,) * _spans(self.record), error=why)
        return replace(merge(self.record, [self.outcomes.get(r, none) for r in self.ranks]), late=True)


def _spans(record: Record) -> int:
    return len(record.spans) if isinstance(record, Move) else 0


def merge(record: Record, outcomes: Sequence[Outcome]) -> Merged:
    """One outcome for all ranks: bits intersected; what must agree is compared. Raises :class:`GroupLost` where ranks differ."""
    error = next((o.error for o in outcomes if o.error), "")
    spans = _spans(record)
    bits = []
    for i in range(spans):
        both = -1
        for outcome in outcomes:
            both &= outcome.bits[i] if i < len(outcome.bits) else 0
        bits.append(both)
    first = outcomes[0]
    if not error and any(o.output != first.output for o in outcomes):
        raise GroupLost(f"the ranks sampled different tokens: {[o.output for o in outcomes]}")
    # Digests are told for all ranks or not at all: a rank that failed has none to set beside the others'.
    names = () if error else first.digests
    digests = {c: tuple(zip(*(o.digests.get(c, ()) for o in outcomes), strict=True)) for c in names}
    refused = any(o.refused for o in outcomes)
    late = any(o.late for o in outcomes)
    return Merged(tuple(bits), first.found, first.output, first.logprobs, digests, error, refused, first.count, first.retry, late)
