"""Dropping a namespace: complete when it ends, fenced against what was begun before, at every step of a request; others are untouched."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from hicache_ray.errors import Busy, Cancelled, EngineError, HiCacheError
from hicache_ray.keys import page_keys, space_of
from hicache_ray.records import Clear, Compute, Lookup, Move, Outcome
from hicache_ray.spec import Tier
from hicache_ray.story import Dropped
from hicache_ray.testing import Served, Stack, full
from tests.core.drive import Steps, all_bytes_are_right, at_rest, ended, is_move, prompt
from tests.core.scenes import CROWDED, DECODED, FETCH, PREFETCH, SCENES, A, B, Scene, all_is_well_and_the_next_request_too, hybrid

OTHER: Mapping[str, str] = {"tenant": "other", "salt": "o"}
E = prompt(8, 300)


def space(stack: Stack) -> bytes:
    return space_of(stack.ns.digest())


def nothing_is_left(stack: Stack) -> None:
    mine = space(stack)
    for place in stack.res.pools:
        assert not any(space_of(stack.res.index.key(e)) == mine for e in stack.res.index.in_place(place).tolist())
    assert stack.store is not None
    assert list(stack.store.scan(mine)) == []


def drop(stack: Stack) -> str:
    name = stack.group.drop_space(space(stack))
    stack._collect()
    return name


@pytest.mark.parametrize("scene", SCENES, ids=lambda s: s.name)
def test_drop_at_every_step(scene: Scene) -> None:
    """The request goes on to its end, a prefetch is revoked; nothing of before is left when the drop ends, nor comes later."""
    total = scene.play(scene.started())
    for count in range(total + 1):
        steps = scene.started()
        stack = steps.stack
        scene.play(steps, count)
        name = drop(stack)
        while not ended(stack, name):
            assert steps.next() is not None
        nothing_is_left(stack)
        steps.settle()
        (end,) = ended(stack, name)
        assert end.error is None
        (other,) = ended(stack, "r")
        assert other.error is None or (scene is PREFETCH and isinstance(other.error, Cancelled))
        at_rest(stack)
        nothing_is_left(stack)
        assert (stack.probe(B).l1, stack.probe(B).l2, stack.probe(B).l3) == (0, 0, 0)
        all_is_well_and_the_next_request_too(scene, stack)


@pytest.mark.parametrize("scene", [FETCH, CROWDED], ids=lambda s: s.name)
def test_a_request_that_comes_during_a_drop_begins_after_it(scene: Scene) -> None:
    """Also while one from before still runs: what the newcomer makes is kept, what the old one makes is not."""
    total = scene.play(scene.started())
    for count in range(0, total + 1, 3):
        steps = scene.started()
        stack = steps.stack
        scene.play(steps, count)
        name = drop(stack)
        stack.begin(E, "new")
        if not ended(stack, name):
            steps.collect()
            assert not any(e.record.rid == "new" for e in steps.queue)
        steps.settle()
        assert ended(stack, name)[0].error is None
        assert stack.served["new"] == Served(0, 0, 0, len(E))
        at_rest(stack)
        all_bytes_are_right(stack, (B, E))
        assert stack.probe(E).l1 == 256
        assert stack.probe(B).reusable == 0


def test_another_namespace_is_untouched() -> None:
    stack = hybrid(l1=32)
    stack.put(A, namespace=OTHER)
    stack.put(A)
    stack.put(B, "r", decoded=DECODED)
    stack.settle()
    before = stack.probe(A, namespace=OTHER)
    assert before.l1 == before.l2 == before.l3 == 512
    objects = len(list(stack.store.scan(space(stack)))) if stack.store else 0
    gone = stack.drop_space()
    assert gone.storage == objects > 0
    assert gone.device > 0
    assert gone.host > 0
    nothing_is_left(stack)
    assert stack.probe(A, namespace=OTHER) == before
    assert stack.put(A, namespace=OTHER) == Served(512, 0, 0, 128)
    stack.settle()
    at_rest(stack)


def test_what_others_do_goes_on_during_a_drop() -> None:
    """A drop waits for no request, and holds none of another namespace back."""
    stack = hybrid()
    stack.put(A)
    stack.settle()
    steps = Steps(stack)
    stack.begin(B, "r", decoded=DECODED)
    running = steps.until(lambda e: isinstance(e.record, Compute))
    name = drop(stack)
    stack.begin(A, "other", namespace=OTHER)
    steps.collect()
    assert [e.record.rid for e in steps.queue if isinstance(e.record, Lookup)] == ["other"]
    while not ended(stack, name):
        assert steps.next() is not None
    assert not ended(stack, "r")
    nothing_is_left(stack)
    steps.queue.insert(0, running)
    steps.settle()
    assert stack.served["other"] == Served(0, 0, 0, len(A))
    nothing_is_left(stack)
    at_rest(stack)


def test_a_write_in_flight_is_waited_for_and_cleared() -> None:
    """Also one that its story has given up."""
    for late in (False, True):
        stack = hybrid()
        steps = Steps(stack)
        stack.begin(A, "r")
        writes = [steps.until(lambda e: is_move(e, Tier.HOST, Tier.STORAGE)), steps.queue.pop(0)]
        if late:
            stack.clock.advance(1000.0)
            stack.group.tick()
        name = drop(stack)
        assert stack.pending() == []
        assert not any(isinstance(e, Dropped) for e in stack.events)
        for envelope in writes:
            stack.run(envelope)
        (clear,) = stack.pending()
        assert isinstance(clear.record, Clear)
        assert clear.record.prefix == space(stack)
        stack.run(clear)
        assert ended(stack, name)[0].error is None
        nothing_is_left(stack)
        steps.settle()
        at_rest(stack)


def test_a_read_in_flight_publishes_nothing() -> None:
    """The request is not waited for; its slots stay leased until the ranks have reported, and it computes."""
    steps = FETCH.started()
    stack = steps.stack
    reads = [steps.until(lambda e: is_move(e, Tier.STORAGE, Tier.HOST)), steps.queue.pop(0)]
    assert isinstance(reads[0].record, Move)
    outcomes = [stack.execute(e) for e in reads]  # from before
    name = drop(stack)
    steps.run()
    assert ended(stack, name)[0].error is None
    assert sum(p.held for p in stack.res.pools.values()) > 0
    for envelope, outcome in zip(reads, outcomes, strict=True):
        assert outcome.bits
        stack.report(envelope, outcome)
    steps.settle()
    assert stack.served["r"] == Served(0, 0, 0, len(B) - DECODED)
    nothing_is_left(stack)
    at_rest(stack)


def test_an_answer_from_before_is_none() -> None:
    """A lookup that has seen what was dropped since leads to no read."""
    steps = FETCH.started()
    stack = steps.stack
    question = steps.until(lambda e: isinstance(e.record, Lookup))
    outcome = stack.execute(question)
    drop(stack)
    steps.run()
    stack.report(question, outcome)
    steps.collect()
    assert not any(is_move(e, Tier.STORAGE, Tier.HOST) for e in steps.queue)
    steps.settle()
    assert stack.served["r"].computed == len(B) - DECODED
    at_rest(stack)


def test_a_held_drop_keeps_requests_back_until_it_is_lifted() -> None:
    stack = hybrid()
    stack.put(A)
    stack.settle()
    name = stack.group.drop_space(space(stack), timeout_s=10.0, hold=True)
    stack._collect()
    (gone,) = [e for e in stack.events if isinstance(e, Dropped)]
    assert gone.storage is None
    assert gone.host > 0
    assert stack.store is not None
    assert list(stack.store.scan(space(stack)))  # that is the caller's
    with pytest.raises(Busy, match="is being dropped"):
        stack.group.drop_space(space(stack))
    stack.begin(A, "new")
    assert stack.pending() == []
    stack.store.clear(1.0, space(stack))
    stack.group.lift(name)
    stack.settle()
    assert stack.served["new"] == Served(0, 0, 0, len(A))
    with pytest.raises(HiCacheError, match="drop again"):
        stack.group.lift(name)
    at_rest(stack)


def test_a_held_drop_that_nobody_lifts_ends_by_itself() -> None:
    stack = hybrid()
    name = stack.group.drop_space(space(stack), timeout_s=10.0, hold=True)
    stack.begin(A, "new")
    assert stack.pending() == []
    stack.clock.advance(10.0)
    stack.group.tick()
    stack._collect()
    assert isinstance(ended(stack, name)[0].error, Busy)
    stack.settle()
    assert stack.served["new"].computed == len(A)
    at_rest(stack)


def test_storage_that_cannot_clear_is_told() -> None:
    stack = hybrid()
    stack.put(A)
    stack.settle()
    name = drop(stack)
    (clear,) = stack.pending()
    stack.report(clear, Outcome(error="the second shard did not answer"))
    end = ended(stack, name)[0]
    assert isinstance(end.error, EngineError)
    assert "second shard" in str(end.error)
    assert stack.probe(A).l2 == 0
    stack.drop_space()
    nothing_is_left(stack)
    at_rest(stack)


def test_a_flush_and_a_drop_together() -> None:
    """Requests that one of them holds back begin when neither does."""
    stack = hybrid(pools={"full": full()})
    steps = Steps(stack)
    stack.begin(A, "r")
    writes = [steps.until(lambda e: is_move(e, Tier.HOST, Tier.STORAGE)), steps.queue.pop(0)]
    first = drop(stack)
    second = stack.group.flush((Tier.DEVICE, Tier.HOST), 100.0)
    stack.begin(E, "new")
    stack.begin(E, "other", namespace=OTHER)
    assert stack.pending() == []
    for envelope in writes:
        stack.run(envelope)
    steps.settle()
    assert [e.rid for e in stack.events if hasattr(e, "error") and e.rid in (first, second)] == [first, second]
    assert stack.served["new"] == stack.served["other"] == Served(0, 0, 0, len(E))
    at_rest(stack)


def test_a_prompt_without_a_whole_page_belongs_to_its_namespace_too() -> None:
    stack = hybrid()
    name = stack.group.drop_space(space(stack), timeout_s=10.0, hold=True)
    stack.begin([1, 2, 3], "short")
    assert stack.pending() == []
    stack.group.lift(name)
    stack.settle()
    assert stack.served["short"] == Served(0, 0, 0, 3)
    assert page_keys(stack.ns, stack._prompts["short"]) == ()
