"""L3 comes and goes while requests run: reads in flight end as misses at once, nothing leaks, and attached again it works."""

from __future__ import annotations

from typing import Any

import pytest

from hicache_ray.executor import Executor
from hicache_ray.records import Lane, Lookup, Move, lane_of
from hicache_ray.resume import Limit
from hicache_ray.spec import Tier
from hicache_ray.storage.wrappers import StoreWrapper
from hicache_ray.testing import Served, Stack, full
from tests.core.drive import Steps, all_bytes_are_right, at_rest, ended, is_move, prompt
from tests.core.scenes import DECODED, FETCH, PREFETCH, SCENES, A, B, Scene, all_is_well_and_the_next_request_too, go_on, hybrid


def to_the_end(scene: Scene, steps: Steps) -> None:
    """The request ends, and with it its backup."""
    steps.run()
    if scene is PREFETCH and "r" in steps.stack.group.active():
        go_on(steps.stack)
    steps.settle()


@pytest.mark.parametrize("scene", SCENES, ids=lambda s: s.name)
def test_detach_at_every_step(scene: Scene) -> None:
    total = scene.play(scene.started())
    for count in range(total + 1):
        steps = scene.started()
        stack = steps.stack
        scene.play(steps, count)
        steps.collect()
        before = {e.record.id for e in [*steps.seen, *steps.queue]}
        stack.detach()
        to_the_end(scene, steps)
        later = [e.record for e in steps.seen if e.record.id not in before]
        assert not any(lane_of(r) in (Lane.ASK, Lane.STORAGE) for r in later)
        (end,) = ended(stack, "r")
        assert end.error is None
        at_rest(stack)
        assert not stack.res.index._durable.any()
        stack.attach()
        all_is_well_and_the_next_request_too(scene, stack)
        # What was not written while storage was away is written by the next request over it.
        assert stack.write_policy == "write_back" or stack.probe(B).l3 == 768


@pytest.mark.parametrize("what", [Lookup, Move], ids=["lookup", "read"])
@pytest.mark.parametrize("again", [False, True], ids=["detached", "attached again"])
def test_what_is_in_flight_ends_as_a_miss_at_once(what: type, again: bool) -> None:
    """Before any rank has reported; the slots of a read are not given out until all have, also when storage is attached again."""
    steps = FETCH.started()
    stack = steps.stack
    flying = [steps.until(lambda e: isinstance(e.record, what) and lane_of(e.record) in (Lane.ASK, Lane.STORAGE))]
    flying += steps.queue
    steps.queue = []
    held = sum(p.held for p in stack.res.pools.values())
    stack.detach()
    if again:
        stack.attach()
    steps.run()
    assert stack.served["r"] == Served(0, 0, 0, len(B) - DECODED)
    assert stack._jobs["r"].limit is Limit.DETACHED
    kept = sum(p.held for p in stack.res.pools.values())
    assert kept == held
    cached = {place: stack.res.index.in_place(place).tolist() for place in stack.res.pools}
    for envelope in flying:
        stack.run(envelope)
    assert {place: stack.res.index.in_place(place).tolist() for place in stack.res.pools} == cached
    for executed in stack.executed:  # the reports of these have come after those of others: that is the point
        executed[:] = [e for e in executed if e.record.id != flying[0].record.id]
    steps.settle()
    at_rest(stack)
    all_bytes_are_right(stack, (A, B))


def test_a_write_that_lands_after_the_detach_is_not_believed() -> None:
    stack = hybrid()
    steps = Steps(stack)
    stack.begin(A, "r")
    writes = [steps.until(lambda e: is_move(e, Tier.HOST, Tier.STORAGE)), steps.queue.pop(0)]
    stack.detach()
    stack.attach()
    for envelope in writes:
        stack.run(envelope)
    assert not stack.res.index._durable.any()
    steps.settle()
    at_rest(stack)


def test_while_detached_only_the_near_tiers_serve_and_a_new_store_begins_empty() -> None:
    stack = hybrid()
    stack.put(A)
    stack.settle()
    assert stack.store is not None
    assert stack.probe(A).l3 == 512
    stack.detach()
    calls = stack.calls
    stack.put(B, "r", decoded=DECODED)
    stack.settle()
    assert stack.served["r"].l1 == 640
    assert all(lane_of(e.record) is not Lane.STORAGE for e in stack.executed[0][-(stack.calls - calls) // 2 :])
    stack.flush(l3=True)  # of storage nothing is asked
    assert stack.probe(A).l3 == 512
    assert stack.put(A) == Served(0, 0, 0, len(A))
    stack.store.clear(1.0)
    stack.attach()
    assert stack.put(A) == Served(512, 0, 0, 128)
    stack.settle()
    assert stack.probe(A).l3 == 512
    at_rest(stack)


def test_a_flush_of_storage_that_is_taken_away_fails() -> None:
    stack = hybrid()
    stack.put(A)
    stack.settle()
    name = stack.group.flush((Tier.STORAGE,))
    stack._collect()
    stack.detach()
    (end,) = ended(stack, name)
    assert "storage was detached" in str(end.error)
    stack.settle()
    at_rest(stack)


def test_a_detach_between_two_lookups_takes_back_what_the_first_has_said() -> None:
    """A component that looks ahead is asked for under keys of its own."""
    stack = Stack(pools={"full": full(), "draft": full(role="draft", lookahead=1)}, l1=40, l2=40)
    tokens = prompt(1, 64 * 8 + 1)
    stack.put(tokens)
    stack.settle()
    stack.flush()
    steps = Steps(stack)
    stack.begin(tokens, "r")
    steps.queue.insert(0, steps.until(lambda e: isinstance(e.record, Lookup)))
    steps.next()
    second = steps.until(lambda e: isinstance(e.record, Lookup))
    stack.detach()
    steps.queue.append(second)
    steps.settle()
    assert not any(is_move(e, Tier.STORAGE, Tier.HOST) for e in steps.seen)
    assert stack.served["r"] == Served(0, 0, 0, len(tokens))
    at_rest(stack)


def test_what_runs_when_storage_is_taken_away_ends_with_the_store_it_began_with() -> None:
    stack = hybrid()
    assert stack.store is not None
    for executor in stack._executors:

        class Leaving(StoreWrapper):
            def put(self, *args: Any, executor: Executor = executor) -> int:
                executor.store = None  # as another thread of the rank does, between two components
                return super().put(*args)

        executor.store = Leaving(stack.store)
    stack.put(A)
    stack.settle()
    assert stack.probe(A).l3 == 512
    assert [executor.store for executor in stack._executors] == [None] * stack.ranks
