"""Reports that come after the deadline: the story has gone on without them, and nothing they write to is given out meanwhile."""

from __future__ import annotations

import numpy as np
import pytest

from hicache_ray.group import Envelope
from hicache_ray.records import Move, Outcome
from hicache_ray.resume import Limit
from hicache_ray.spec import Tier
from hicache_ray.testing import Served, Stack, full
from tests.core.drive import Steps, all_bytes_are_right, at_rest, ended, is_move, prompt, to_store
from tests.core.scenes import DECODED, FETCH, PREFETCH, A, B, Scene, all_is_well_and_the_next_request_too


def past_the_deadline(steps: Steps) -> None:
    stack = steps.stack
    deadline = stack.group.next_deadline()
    assert deadline is not None
    stack.clock.advance(deadline - stack.clock())
    stack.group.tick()
    stack._collect()


def targets(envelope: Envelope) -> dict[str, list[int]]:
    assert isinstance(envelope.record, Move)
    return {span.component: span.target.tolist() for span in envelope.record.spans}


def taken(stack: Stack, tier: Tier, held: dict[str, list[int]]) -> bool:
    return all(bool(np.all(stack.res.pools[(tier, name)].pinned(np.asarray(slots, dtype=np.int32)))) for name, slots in held.items())


def beside_the_order(stack: Stack, late: list[Envelope]) -> None:
    """One rank's write has come after others of its own: that is the point of the test, not a fault of the order that ``audit`` finds."""
    for executed in stack.executed:
        executed[:] = [e for e in executed if e.record.id != late[0].record.id]


def read_in_flight(scene: Scene) -> tuple[Steps, list[Envelope]]:
    steps = scene.started()
    first = steps.until(lambda e: is_move(e, Tier.STORAGE, Tier.HOST))
    return steps, [first, steps.queue.pop(0)]


@pytest.mark.parametrize("reported", [(), (0,), (1,)], ids=["nobody", "rank 0", "rank 1"])
@pytest.mark.parametrize("scene", [FETCH, PREFETCH], ids=lambda s: s.name)
def test_a_read_that_is_late(scene: Scene, reported: tuple[int, ...]) -> None:
    """The request computes instead; the slots of the read stay untouched until every rank has reported."""
    steps, reads = read_in_flight(scene)
    stack = steps.stack
    slots = targets(reads[0])
    for envelope in reads:
        if envelope.rank in reported:
            stack.run(envelope)
    past_the_deadline(steps)
    assert taken(stack, Tier.HOST, slots)
    steps.run()
    if scene is FETCH:
        assert stack.served["r"] == Served(0, 0, 0, len(B) - DECODED)
    else:
        assert stack.poll("r").tokens == 0
        stack.abort("r")
    # Others come and go; host room is asked for, and these slots are never given.
    for seed in (11, 12, 13):
        stack.put(prompt(seed, 300))
        stack.settle()
    assert taken(stack, Tier.HOST, slots)
    index = {place: sorted(stack.res.index.in_place(place).tolist()) for place in stack.res.pools}
    before = len(stack.events)
    for envelope in reads:
        if envelope.rank not in reported:
            stack.run(envelope)  # the bytes come now
    assert index == {place: sorted(stack.res.index.in_place(place).tolist()) for place in stack.res.pools}
    assert len(stack.events) == before
    beside_the_order(stack, reads)
    others = [prompt(seed, 300) for seed in (11, 12, 13)]
    all_bytes_are_right(stack, (A, B, *others))
    at_rest(stack)


def test_a_read_of_which_one_rank_is_late_counts_for_nobody() -> None:
    """Rank 0 has all its pages, rank 1 has said nothing: a resume from them would be on half of the heads."""
    steps, reads = read_in_flight(FETCH)
    stack = steps.stack
    stack.run(reads[0])
    past_the_deadline(steps)
    assert stack.probe(B).l2 == 0
    steps.run()
    stack.run(reads[1])
    beside_the_order(stack, reads)
    steps.settle()
    all_is_well_and_the_next_request_too(FETCH, stack)


def test_cancelled_while_a_read_is_in_flight() -> None:
    steps, reads = read_in_flight(FETCH)
    stack = steps.stack
    stack.abort("r")
    assert ended(stack, "r")[0].error is not None  # at once; nobody waits for the read any more
    assert stack.group.next_deadline() is None
    assert taken(stack, Tier.HOST, targets(reads[0]))
    assert not stack.group.idle
    for envelope in reads:
        stack.run(envelope)
    steps.settle()
    all_is_well_and_the_next_request_too(FETCH, stack)


def test_a_lookup_that_is_late() -> None:
    """The answer is not waited for; when it comes it changes nothing."""
    steps = FETCH.started()
    stack = steps.stack
    lookup = steps.until(to_store)
    assert stack.group.next_deadline() == stack.clock() + 2.0
    past_the_deadline(steps)
    steps.run()
    assert stack.served["r"] == Served(0, 0, 0, len(B) - DECODED)
    assert stack._jobs["r"].limit is Limit.LOOKUP
    stack.run(lookup)
    steps.settle()
    all_is_well_and_the_next_request_too(FETCH, stack)


def test_a_write_to_storage_that_is_late() -> None:
    """Its source pages are not evicted under it; nothing is claimed to be durable; a flush waits for it."""
    stack = Stack(pools={"full": full()}, ranks=2, l2=10)
    stack.begin(A, "a")
    steps = Steps(stack)
    writes = [steps.until(lambda e: is_move(e, Tier.HOST, Tier.STORAGE)), steps.queue.pop(0)]
    past_the_deadline(steps)
    assert not stack.group.idle
    assert stack.group.next_deadline() is None
    sources = {"full": writes[0].record.spans[0].source.tolist()}  # type: ignore[union-attr]
    assert len(sources["full"]) == 10
    other = prompt(5, 640)
    stack.put(other)  # its backup finds no room in L2
    steps.settle()
    assert stack.have("l2", "full", other) == set()
    assert stack.have("l2", "full", A) == set(range(10))
    assert taken(stack, Tier.HOST, sources)
    name = stack.group.flush((Tier.STORAGE,), timeout_s=100.0)
    stack._collect()
    assert not ended(stack, name)
    for envelope in writes:
        stack.run(envelope)
    steps.settle()
    assert ended(stack, name)[0].error is None
    assert stack.have("l3", "full", A) == set()
    stack.put(A)
    stack.settle()
    assert stack.probe(A).l3 == 576
    all_bytes_are_right(stack, (A, other))
    at_rest(stack)


def test_late_and_failed_reports_of_a_read_release_once() -> None:
    steps, reads = read_in_flight(FETCH)
    stack = steps.stack
    past_the_deadline(steps)
    for envelope in reads:
        stack.report(envelope, Outcome(error="too late"))
        stack.report(envelope, Outcome(error="too late"))
    steps.settle()
    all_is_well_and_the_next_request_too(FETCH, stack)
