"""Flush: complete when it ends, refused or waited for, at every step of what else is under way."""

from __future__ import annotations

import pytest

from hicache_ray.errors import Busy, Cancelled, StorageDetached
from hicache_ray.records import Clear, Compute, Lookup, Move, Outcome
from hicache_ray.spec import Tier
from hicache_ray.testing import Served, full
from tests.core.drive import Steps, all_bytes_are_right, at_rest, ended, is_move, prompt
from tests.core.scenes import PREFETCH, SCENES, A, B, Scene, all_is_well_and_the_next_request_too, hybrid

ALL = (Tier.DEVICE, Tier.HOST, Tier.STORAGE)


def nothing_is_cached(steps: Steps) -> None:
    found = steps.stack.probe(B)
    assert (found.l1, found.l2, found.l3, found.reusable) == (0, 0, 0, 0)
    assert all(not steps.stack.have(tier, pool, B, rank) for tier in ("l1", "l2", "l3") for pool in steps.stack.pools for rank in (0, 1))
    for pool in steps.stack.res.pools.values():
        assert pool.free == pool.capacity


@pytest.mark.parametrize("scene", SCENES, ids=lambda s: s.name)
def test_flush_at_every_step_with_a_timeout(scene: Scene) -> None:
    """It waits for the request and its backup, revokes a prefetch, and then everything is gone."""
    total = scene.play(scene.started())
    for count in range(total + 1):
        steps = scene.started()
        scene.play(steps, count)
        name = steps.stack.group.flush(ALL, timeout_s=1000.0)
        steps.stack._collect()
        steps.settle()
        (end,) = ended(steps.stack, name)
        assert end.error is None
        (other,) = ended(steps.stack, "r")
        assert other.error is None or (scene is PREFETCH and isinstance(other.error, Cancelled))
        at_rest(steps.stack)
        nothing_is_cached(steps)
        all_is_well_and_the_next_request_too(scene, steps.stack)


@pytest.mark.parametrize("scene", SCENES, ids=lambda s: s.name)
def test_flush_at_every_step_without_a_timeout(scene: Scene) -> None:
    """A request that runs refuses it, and goes on as if nothing had been asked; its backup alone does not."""
    total = scene.play(scene.started())
    refused = 0
    for count in range(total + 1):
        steps = scene.started()
        scene.play(steps, count)
        over = bool(ended(steps.stack, "r"))
        if scene is PREFETCH or over:
            steps.stack.group.flush(ALL)
            steps.stack._collect()
            steps.settle()
            nothing_is_cached(steps)
        else:
            refused += 1
            with pytest.raises(Busy, match="1 requests are under way; give timeout_s"):
                steps.stack.group.flush(ALL)
            steps.settle()
            assert ended(steps.stack, "r")[0].error is None
        all_is_well_and_the_next_request_too(scene, steps.stack)
    assert refused or scene is PREFETCH


def test_a_flush_whose_time_is_over_gives_up_and_nothing_is_lost() -> None:
    scene = SCENES[0]
    steps = scene.started()
    envelope = steps.until(lambda e: isinstance(e.record, Compute))
    stack = steps.stack
    name = stack.group.flush(ALL, timeout_s=5.0)
    stack.begin(prompt(9, 300), "held back")
    assert not stack.pending()
    assert stack.group.next_deadline() == stack.clock() + 5.0
    stack.clock.advance(4.9)
    stack.group.tick()
    stack._collect()
    assert not ended(stack, name)
    stack.clock.advance(0.1)
    stack.group.tick()
    stack._collect()
    (end,) = ended(stack, name)
    assert isinstance(end.error, Busy)
    steps.queue.insert(0, envelope)
    steps.settle()
    assert stack.served["r"] == Served(0, 0, 640, 130)
    assert stack.served["held back"] == Served(0, 0, 0, 300)
    all_bytes_are_right(stack, (A, B, prompt(9, 300)))
    at_rest(stack)


@pytest.mark.parametrize("size", [1, 64, 65, 300])
@pytest.mark.parametrize("tiers", [(Tier.DEVICE,), ALL], ids=["l1", "all"])
def test_requests_that_came_during_a_flush_begin_after_it(size: int, tiers: tuple[Tier, ...]) -> None:
    """Also those that ask nothing of L3 and so go straight to the device."""
    steps = SCENES[0].started()
    stack = steps.stack
    steps.run(3)
    name = stack.group.flush(tiers, timeout_s=1000.0)
    stack.begin(prompt(9, size), "one")
    stack.begin(prompt(9, size), "two")
    stack.abort("two")
    assert isinstance(stack.errors["two"], Cancelled)
    steps.settle()
    assert ended(stack, name)[0].error is None
    assert stack.served["one"] == Served(0, 0, 0, size)
    at_rest(stack)


def test_a_second_flush_is_refused_while_one_is_under_way() -> None:
    steps = SCENES[0].started()
    steps.run(3)
    stack = steps.stack
    stack.group.flush(ALL, timeout_s=10.0)
    with pytest.raises(Busy, match="a flush is under way"):
        stack.group.flush(ALL, timeout_s=10.0)
    steps.settle()
    stack.flush()


def test_while_storage_is_being_cleared_no_deadline_lies_in_the_past() -> None:
    """The timeout of a flush is for what comes before that; a driver that sleeps until the next deadline must not spin."""
    stack = hybrid()
    stack.put(A)
    stack.settle()
    steps = Steps(stack)
    name = stack.group.flush(ALL, timeout_s=1.0)
    stack._collect()
    (clear,) = stack.pending()
    assert isinstance(clear.record, Clear)
    stack.clock.advance(2.0)
    stack.group.tick()
    deadline = stack.group.next_deadline()
    assert deadline is not None
    assert deadline > stack.clock()
    stack.run(clear)
    steps.settle()
    assert ended(stack, name)[0].error is None
    nothing_is_cached(steps)


@pytest.mark.parametrize("where", [(Tier.DEVICE, Tier.HOST), (Tier.HOST, Tier.STORAGE)], ids=["copies", "writes"])
def test_a_preserving_flush_has_one_deadline_for_all_that_it_writes(where: tuple[Tier, Tier]) -> None:
    """When it is over nothing has been emptied, those who waited begin, and what was in flight keeps its slots until it is reported."""
    stack = hybrid(write_policy="write_back")
    stack.put(A)
    stack.settle()
    steps = Steps(stack)
    name = stack.group.flush((Tier.DEVICE, Tier.HOST), timeout_s=5.0, preserve=True)
    stack._collect()
    first = steps.until(lambda e: is_move(e, *where))
    stack.begin(prompt(9, 300), "held back")
    assert stack.group.next_deadline() == stack.clock() + 5.0
    stack.clock.advance(5.0)
    stack.group.tick()
    stack._collect()
    (end,) = ended(stack, name)
    assert isinstance(end.error, Busy)
    assert stack.group.next_deadline() != stack.clock()
    assert stack.probe(A).l1 == 512
    assert isinstance(first.record, Move)
    for span in first.record.spans:
        at = span.target if where[1] is Tier.HOST else span.source
        assert stack.res.pools[(Tier.HOST, span.component)].pinned(at).all()
    steps.queue.insert(0, first)
    steps.settle()
    assert stack.served["held back"] == Served(0, 0, 0, 300)
    all_bytes_are_right(stack, (A, prompt(9, 300)))
    at_rest(stack)
    stack.flush(preserve=True)
    assert stack.probe(A).l3 == 512


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_preserving_flush_without_storage_empties_nothing(when: str) -> None:
    stack = hybrid(write_policy="write_back")
    stack.put(A)
    stack.settle()
    if when == "before":
        stack.detach()
    steps = Steps(stack)
    name = stack.group.flush((Tier.DEVICE, Tier.HOST), preserve=True)
    stack._collect()
    if when == "meanwhile":
        write = steps.until(lambda e: is_move(e, Tier.HOST, Tier.STORAGE))
        stack.detach()
        steps.queue.insert(0, write)
    steps.settle()
    assert isinstance(ended(stack, name)[0].error, StorageDetached)
    assert stack.probe(A).l1 == 512
    at_rest(stack)
    all_bytes_are_right(stack, [A])
    stack.attach()
    stack.flush(preserve=True)
    assert stack.probe(A).l3 == 512


def test_what_storage_could_not_clear_is_said_and_written_again() -> None:
    """It may have cleared a part, so what is still in L2 is persisted anew by the next request over it."""
    stack = hybrid()
    stack.put(A)
    stack.settle()
    steps = Steps(stack)
    name = stack.group.flush((Tier.STORAGE,))
    stack._collect()
    (clear,) = stack.pending()
    stack.execute(clear)
    stack.report(clear, Outcome(error="the second shard did not answer"))
    steps.settle()
    assert "the second shard did not answer" in str(ended(stack, name)[0].error)
    assert stack.probe(A).l3 == 0
    stack.put(A)
    stack.settle()
    assert stack.probe(A).l3 == stack.probe(A).l2 == 512
    at_rest(stack)


def test_a_clear_that_comes_after_its_deadline_is_not_forgotten() -> None:
    """The flush has failed, a request has been persisted meanwhile, then the clear happens all the same: no hint survives it."""
    stack = hybrid()
    steps = Steps(stack)
    name = stack.group.flush((Tier.STORAGE,))
    stack._collect()
    (clear,) = stack.pending()
    stack.clock.advance(1000.0)
    stack.group.tick()
    stack._collect()
    assert ended(stack, name)[0].error is not None
    stack.put(A)
    stack.settle()
    assert stack.probe(A).l3 == 512
    stack.run(clear)
    assert stack.probe(A).l3 == 0
    stack.put(A)
    stack.settle()
    assert stack.probe(A).l3 == 512
    steps.settle()
    at_rest(stack)


def test_a_revoked_read_that_arrives_after_the_flush_is_not_published() -> None:
    steps = PREFETCH.started()
    stack = steps.stack
    reads = [steps.until(lambda e: is_move(e, Tier.STORAGE, Tier.HOST)), steps.queue.pop(0)]
    name = stack.group.flush((Tier.DEVICE, Tier.HOST))
    stack._collect()
    assert ended(stack, name)[0].error is None
    held = sum(p.held for p in stack.res.pools.values())
    assert held > 0  # the ranks may still write there
    for envelope in reads:
        stack.run(envelope)
    steps.settle()
    assert stack.probe(B).l2 == 0
    assert sum(p.held for p in stack.res.pools.values()) == 0
    at_rest(stack)


def test_flush_with_requests_of_every_kind_waiting() -> None:
    """Some before, some after; the ones before are waited for, those after begin when it is done."""
    stack = hybrid(pools={"full": full()}, max_requests=100)
    for i in range(5):
        stack.begin(prompt(20 + i, 100 + i), f"before {i}")
    name = stack.group.flush(ALL, timeout_s=1000.0)
    for i in range(5):
        stack.begin(prompt(30 + i, 50 + i), f"after {i}")
    steps = Steps(stack)
    steps.settle()
    order = [e.rid for e in stack.events if hasattr(e, "report") and e.rid in {name, "before 4", "after 0"}]
    assert order == ["before 4", name, "after 0"]
    assert not stack.errors
    assert isinstance(steps.seen[0].record, Lookup)
    at_rest(stack)


def test_what_is_evicted_meanwhile_leaves_after_the_flush() -> None:
    """Else it would be written to a storage that has been emptied already, before the flush has ended."""
    stack = hybrid(write_policy="write_back")
    stack.put(A)
    stack.settle()
    steps = Steps(stack)
    name = stack.group.flush([Tier.STORAGE])
    stack._collect()
    clear = steps.until(lambda envelope: isinstance(envelope.record, Clear))
    outcome = stack.execute(clear)
    stack.group.evict(Tier.DEVICE, {pool: stack.res.room((Tier.DEVICE, pool)) for pool in stack.pools})
    stack._collect()
    assert steps.run() == 0
    assert not ended(stack, name)
    assert all(not stack.have("l3", pool, A, rank) for pool in stack.pools for rank in (0, 1))
    stack.report(clear, outcome)
    (end,) = ended(stack, name)
    assert end.error is None
    steps.settle()
    assert not stack.have("l1", "full", A)
    assert stack.have("l3", "full", A) == stack.have("l2", "full", A) == set(range(len(A) // stack.page))
    at_rest(stack)
