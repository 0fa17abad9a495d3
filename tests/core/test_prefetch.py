"""Prefetch: what ends the wait, what of a part is kept, who shares what, what is given back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hicache_ray.errors import HiCacheError
from hicache_ray.group import Envelope
from hicache_ray.records import Compute, Lookup, Move, Outcome
from hicache_ray.resume import Limit
from hicache_ray.spec import Component, Tier
from hicache_ray.testing import Served, Stack, full, state, window
from tests.core.drive import Steps, all_bytes_are_right, at_rest, ended, is_move, prompt

PAGE = 8
#: 96 pages of 8 tokens and one token.
LONG = prompt(1, PAGE * 96 + 1)
KV: dict[str, Component] = {"full": full(layers=1)}
HYBRID: dict[str, Component] = {"full": full(layers=1), "swa": window(30, layers=1), "state": state(PAGE, layers=1)}


def stored(tokens: list[int] = LONG, **more: object) -> Stack:
    """The prompt is in L3 and nowhere else."""
    stack = Stack(**{"page": PAGE, "l1": 200, "l2": 200, "l3": 4000, "pools": KV, **more})  # type: ignore[arg-type]
    stack.put(tokens)
    stack.settle()
    stack.flush()
    stack.executed = [[] for _ in stack.executed]
    return stack


def reads(stack: Stack) -> list[Move]:
    return [e.record for e in stack.executed[0] if isinstance(e.record, Move) and e.record.source is Tier.STORAGE]


def is_read(envelope: Envelope) -> bool:
    return is_move(envelope, Tier.STORAGE, Tier.HOST)


def arrive(steps: Steps, records: int) -> None:
    """So many records of reads are executed on all ranks, and the next one is due."""
    for _ in range(records * steps.stack.ranks):
        steps.stack.run(steps.until(is_read))


def past(stack: Stack) -> float:
    """To the next deadline; returns when that was."""
    deadline = stack.group.next_deadline()
    assert deadline is not None
    stack.clock.advance(deadline - stack.clock())
    stack.group.tick()
    stack._collect()
    return stack.clock()


# -- what ends the wait ---------------------------------------------------------------------------------------------------------------


def test_best_effort_has_what_has_arrived_when_the_turn_comes() -> None:
    """Another request is at the device; when it ends, two records have arrived and the rest is revoked."""
    stack = stored(prefetch_policy="best_effort")
    stack.begin(prompt(2, 50), "first")
    steps = Steps(stack)
    steps.collect()
    compute = steps.until(lambda e: isinstance(e.record, Compute))
    stack.begin(LONG, "r")
    arrive(steps, 2)
    assert stack._jobs["r"].phase.value == "fetching"
    stack.run(compute)
    assert stack.cache.restore.fetches.of(stack._jobs["r"]) == []
    steps.settle()
    assert stack.served["r"] == Served(0, 0, 32 * PAGE, len(LONG) - 32 * PAGE)
    assert stack._jobs["r"].limit is Limit.DEADLINE
    assert stack.cache.restore.fetches.counters.revoked == 1
    assert stack.clock() == 0.0
    at_rest(stack)
    all_bytes_are_right(stack, [LONG, prompt(2, 50)])


def test_best_effort_at_an_idle_device_waits_for_the_answer_and_asks_for_nothing() -> None:
    stack = stored(prefetch_policy="best_effort")
    assert stack.put(LONG) == Served(0, 0, 0, len(LONG))
    assert reads(stack) == []  # revoked before any rank was told
    stack.settle()
    at_rest(stack)


def test_best_effort_of_a_prefetch_that_had_time() -> None:
    stack = stored(prefetch_policy="best_effort")
    stack.prefetch("r", LONG)
    assert stack.load("r") == 96 * PAGE
    assert stack._jobs["r"].limit is Limit.NONE
    stack.settle()
    at_rest(stack)


def test_completion_is_handled_when_it_happens() -> None:
    """The request is far back in the queue; its pages are committed and what the fetch holds is given back all the same."""
    stack = stored(prefetch_policy="best_effort")
    stack.begin(prompt(2, 50), "first")
    steps = Steps(stack)
    compute = steps.until(lambda e: isinstance(e.record, Compute))
    stack.begin(LONG, "r")
    steps.run()
    assert stack.poll("r").state == "ready"
    assert stack.probe(LONG).l2 == 96 * PAGE
    assert stack.cache.restore.fetches.tokens == 0
    stack.run(compute)
    steps.settle()
    assert stack.served["r"] == Served(0, 0, 96 * PAGE, 1)
    at_rest(stack)


@pytest.mark.parametrize(("policy", "seconds"), [("timeout", 2.0 + 0.1 * 768 / 1024), ("wait_complete", 30.0)])
def test_the_deadline_ends_the_wait_and_what_has_arrived_is_kept(policy: str, seconds: float) -> None:
    stack = stored(prefetch_policy=policy)
    stack.prefetch("r", LONG)
    steps = Steps(stack)
    arrive(steps, 3)
    late = [steps.until(is_read)]
    assert past(stack) == pytest.approx(seconds)
    assert (stack.poll("r").tokens, stack.poll("r").limit) == (48 * PAGE, Limit.DEADLINE.value)
    assert stack.group.next_deadline(held=False) is None
    assert stack.load("r") == 48 * PAGE
    for envelope in late:
        stack.run(envelope)
    steps.settle()
    assert stack.probe(LONG).l2 == 48 * PAGE
    at_rest(stack)
    all_bytes_are_right(stack, [LONG])


@pytest.mark.parametrize("policy", ["timeout", "wait_complete"])
def test_a_fallback_makes_half_of_a_hybrid_prompt_worth_something(policy: str) -> None:
    """The snapshot and the window of half the length come with the first half of the pages, where the deadline may cut."""
    stack = stored(prefetch_policy=policy, pools=HYBRID, ranks=2)
    stack.prefetch("r", LONG)
    steps = Steps(stack)
    arrive(steps, 3)  # 48 pages
    past(stack)
    assert stack.poll("r").tokens == (48 * PAGE if policy == "timeout" else 0)
    assert stack.poll("r").limit == Limit.DEADLINE.value
    if policy == "timeout":
        assert stack.have("l2", "state", LONG) == {48 * PAGE}
        assert stack.have("l2", "swa", LONG) == {44, 45, 46, 47}
    assert stack.res.pools[(Tier.HOST, "swa")].cached == (4 if policy == "timeout" else 0)
    steps.settle()
    stack.abort("r")
    at_rest(stack)


def test_no_host_memory_before_the_lookup_has_answered() -> None:
    stack = stored(prefetch_policy="timeout")
    stack.prefetch("r", LONG)
    steps = Steps(stack)
    lookup = steps.until(lambda e: isinstance(e.record, Lookup))
    pool = stack.res.pools[(Tier.HOST, "full")]
    assert (pool.free, pool.held) == (200, 0)
    stack.run(lookup)
    assert (pool.free, pool.held) == (104, 96)
    steps.settle()


def test_what_nobody_goes_on_with_is_held_for_a_while_only() -> None:
    stack = stored(settings={"hold_deadline_s": 7.0})
    stack.prefetch("r", LONG)
    stack.prefetch("taken", prompt(2, 100))
    steps = Steps(stack)
    steps.run()
    assert stack.poll("r").state == "ready"
    assert stack.load("taken") == 0
    assert len(stack.res.leases.open("r")) == 1
    began = stack.clock()
    assert past(stack) == began + 7.0
    assert stack.poll("r").state == "cancelled"
    assert "nobody went on with the prefetch r within 7 s" in str(stack.errors["r"])
    with pytest.raises(HiCacheError, match='nothing is held under the id "r"; prefetch it first'):
        stack.group.proceed("r")
    steps.settle()
    at_rest(stack)
    assert stack.put(LONG).l2 == 96 * PAGE  # it is still near


# -- pages that move meanwhile ----------------------------------------------------------------------------------------------------------


def test_one_rank_misses_a_page_and_the_reason_is_right() -> None:
    """512 tokens, a snapshot at every page: page 5 is gone on one rank, so that 320 is the longest legal length there is."""
    stack = stored(prompt(3, 512), page=64, pools={"full": full(), "state": state(64)}, ranks=2)
    assert stack.store is not None
    stack.store.fault("get", "gone", 3, only=(5,))
    stack.prefetch("r", prompt(3, 512))
    stack.settle()
    assert (stack.poll("r").tokens, stack.poll("r").limit) == (320, Limit.ABSENT.value)
    assert len(reads(stack)) == 2
    assert stack.load("r") == 320
    at_rest(stack)


def test_pages_that_were_somewhere_else_for_a_moment() -> None:
    """The read misses them once, the second lookup finds them: one retry, and all is there."""
    stack = stored(ranks=2)
    stack.prefetch("r", LONG)
    steps = Steps(stack)

    def spoil(envelope: Envelope, outcome: Outcome) -> Outcome:
        first = is_read(envelope) and envelope.rank == 1 and stack.cache.restore.fetches.counters.begun == 1
        return replace(outcome, bits=tuple(b & ~2 for b in outcome.bits)) if first else outcome

    steps.run(spoil=spoil)
    assert (stack.poll("r").tokens, stack.poll("r").limit) == (96 * PAGE, Limit.NONE.value)
    again = reads(stack)[-1].spans
    assert [len(s) for s in again] == [6]  # what had arrived was kept
    assert sum(isinstance(e.record, Lookup) for e in steps.seen) == 2
    assert stack.load("r") == 96 * PAGE
    at_rest(stack)
    all_bytes_are_right(stack, [LONG])


def test_there_is_one_retry_and_no_more() -> None:
    stack = stored()
    stack.prefetch("r", LONG)
    steps = Steps(stack)
    steps.run(spoil=lambda e, o: replace(o, bits=tuple(b & ~2 for b in o.bits)) if is_read(e) else o)
    assert (stack.poll("r").tokens, stack.poll("r").limit) == (17 * PAGE, Limit.UNREAD.value)  # the second of each record
    assert sum(isinstance(e.record, Lookup) for e in steps.seen) == 2
    assert stack.cache.restore.fetches.counters.begun == 2
    stack.abort("r")
    at_rest(stack)


def test_a_lookup_that_could_not_say_is_asked_once_more() -> None:
    stack = stored()
    stack.prefetch("r", LONG)
    steps = Steps(stack)
    asked = []

    def spoil(envelope: Envelope, outcome: Outcome) -> Outcome:
        if not isinstance(envelope.record, Lookup):
            return outcome
        asked.append(envelope)
        return outcome if len(asked) > 1 else replace(outcome, found={"full": (0,), "full~": (0,)}, retry=True)

    steps.run(spoil=spoil)
    assert len(asked) == 2
    assert stack.poll("r").tokens == 96 * PAGE
    stack.abort("r")
    at_rest(stack)


AHEAD: dict[str, Component] = {"full": full(layers=1), "mtp": full(layers=1, role="draft", lookahead=1)}


def is_question(envelope: Envelope) -> bool:
    return isinstance(envelope.record, Lookup)


@pytest.mark.parametrize("policy", ["best_effort", "timeout", "wait_complete"])
def test_a_target_goes_on_where_the_host_has_no_room_for_its_draft(policy: str) -> None:
    """The target resumes from the device, its draft could from L3: all that is refused is the draft's."""
    pools = {"full": full(layers=1), "draft": full(layers=1, role="draft")}
    stack = Stack(page=PAGE, pools=pools, l1=20, l2=4, prefetch_policy=policy)
    first, longer = prompt(1, 3 * PAGE + 1), [*prompt(1, 3 * PAGE), *prompt(2, 2 * PAGE + 1)]
    stack.put(first)
    stack.settle()
    for tier in ("l1", "l2"):
        stack.evict(tier, {"draft": 20})
    held = stack.res.leases.alloc("somebody else", (Tier.HOST, "draft"), 4)
    assert stack.put(longer) == Served(l1=3 * PAGE, l2=0, l3=0, computed=2 * PAGE + 1)
    stack.res.leases.release(held)
    stack.settle()
    all_bytes_are_right(stack, [longer])
    at_rest(stack)


def test_what_a_target_has_in_storage_comes_where_there_is_no_room_for_its_draft() -> None:
    stack = stored(pools={"full": full(layers=1), "draft": full(layers=1, role="draft")}, prefetch_policy="wait_complete", l2=100)
    held = stack.res.leases.alloc("somebody else", (Tier.HOST, "draft"), 90)
    assert stack.put(LONG, "r") == Served(l1=0, l2=0, l3=96 * PAGE, computed=1)
    assert {s.component for r in reads(stack) for s in r.spans} == {"full"}
    assert stack.clock() == 0.0  # nobody has waited for that room
    stack.res.leases.release(held)
    stack.settle()
    all_bytes_are_right(stack, [LONG])
    at_rest(stack)


def test_all_questions_of_a_request_share_one_deadline() -> None:
    """Two questions (a draft that looks ahead has keys of its own), each of which the store could not answer at once: the third has what
    the first two have left of the 2 s, and nobody is asked when nothing is left."""
    stack = stored(pools=AHEAD, prefetch_policy="timeout")
    stack.prefetch("r", LONG)
    steps, allowed = Steps(stack), []
    for seconds in (0.75, 0.5, 0.75):
        question = steps.until(is_question)
        assert isinstance(question.record, Lookup)
        allowed.append(question.record.timeout_s)
        stack.clock.advance(seconds)
        stack.report(question, replace(stack.execute(question), retry=len(allowed) == 1))
    assert allowed == [2.0, 1.25, 0.75]
    steps.run()
    assert sum(is_question(e) for e in steps.seen) == 0  # all were answered by hand
    assert (stack.poll("r").tokens, stack.poll("r").limit) == (96 * PAGE, Limit.NONE.value)
    stack.abort("r")
    steps.settle()
    at_rest(stack)


def test_no_question_when_the_time_is_over() -> None:
    stack = stored(pools=AHEAD, prefetch_policy="timeout")
    stack.prefetch("r", LONG)
    steps = Steps(stack)
    first = steps.until(is_question)
    stack.clock.advance(2.0)
    stack.report(first, replace(stack.execute(first), retry=True))
    steps.settle()
    assert not any(is_question(e) for e in steps.seen)
    # What was said holds: all of the target. The draft was not asked about.
    assert (stack.poll("r").tokens, stack.poll("r").limit) == (96 * PAGE, Limit.NONE.value)
    assert {s.component for r in reads(stack) for s in r.spans} == {"full"}
    stack.abort("r")
    at_rest(stack)


@pytest.mark.parametrize("how", ["late", "failed"])
def test_a_retry_without_an_answer_leaves_what_the_first_one_has_said(how: str) -> None:
    """Three quarters of the pages were found; the second answer does not come. What L3 may have of the rest is not known to be gone."""
    stack = stored(prefetch_policy="timeout")
    stack.prefetch("r", LONG)
    steps = Steps(stack)
    question = steps.until(is_question)
    found = {"full": (0,), "full~": ((1 << 72) - 1,)}
    stack.report(question, Outcome(found=found, retry=True))
    again = steps.until(is_question)
    if how == "late":
        assert past(stack) == 2.0
    else:
        stack.report(again, Outcome(error="injected"))
    steps.run()
    why = Limit.LOOKUP if how == "late" else Limit.LOOKUP_FAILED
    assert (stack.poll("r").tokens, stack.poll("r").limit) == (72 * PAGE, why.value)
    assert stack.load("r") == 72 * PAGE
    if how == "late":
        stack.run(again)  # nobody listens any more
    steps.settle()
    at_rest(stack)
    all_bytes_are_right(stack, [LONG])


def test_what_a_cut_fetch_will_not_bring_is_fetched_anew() -> None:
    """The first record of a fetch fails while the second is under way: whoever comes now has the second's pages from there, and everything
    else from a fetch of its own."""
    stack = stored()
    stack.prefetch("a", LONG)
    steps = Steps(stack)
    first = steps.until(is_read)
    second = steps.until(is_read)
    stack.report(first, Outcome(bits=(0,), error="injected"))
    stack.prefetch("b", LONG)
    own = steps.until(is_read)
    fetches = stack.cache.restore.fetches
    assert (fetches.counters.begun, fetches.counters.shared, fetches.counters.cut) == (2, 1, 1)
    for envelope in (second, own):
        stack.run(envelope)
    steps.run()
    assert (stack.poll("b").tokens, stack.poll("b").limit) == (96 * PAGE, Limit.NONE.value)
    read = [key for record in reads(stack) for span in record.spans for key in span.keys]
    assert len(read) == len(set(read)) == 96  # nothing twice; the first record's pages were never read for "a"
    stack.abort("a")
    stack.abort("b")
    steps.settle()
    assert fetches._names == {}
    at_rest(stack)


# -- one fetch for many -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gives_up", [None, "a", "b"])
@pytest.mark.parametrize("policy", ["timeout", "wait_complete", "best_effort"])
def test_two_that_want_the_same_pages_share_one_fetch(policy: str, gives_up: str | None) -> None:
    """The second goes on further than the first; whoever gives up, the other has its pages."""
    longer = LONG + prompt(7, 200)
    stack = stored(longer, prefetch_policy=policy, pools=HYBRID, ranks=2)
    stack.prefetch("a", LONG)
    steps = Steps(stack)
    arrive(steps, 1)
    stack.prefetch("b", longer)
    while not stack.cache.restore.fetches.of(stack._jobs["b"]):
        steps.next()
    if gives_up is not None:
        stack.abort(gives_up)
        assert ended(stack, gives_up)[0].error is not None
    steps.run()
    length = {"a": 96 * PAGE, "b": 121 * PAGE}
    for rid in {"a", "b"} - {gives_up}:
        assert (stack.poll(rid).state, stack.poll(rid).tokens) == ("ready", length[rid])
    times: dict[bytes, int] = {}
    for record in reads(stack):
        for span in record.spans:
            for key in span.keys if span.component == "full" else ():
                times[key] = times.get(key, 0) + 1
    assert set(times.values()) == {1}
    for rid in {"a", "b"} - {gives_up}:
        assert stack.load(rid) == length[rid]
    steps.settle()
    at_rest(stack)
    all_bytes_are_right(stack, [longer])


def test_a_fetch_that_nobody_wants_any_more_stops() -> None:
    stack = stored()
    stack.prefetch("a", LONG)
    steps = Steps(stack)
    arrive(steps, 1)
    stack.prefetch("b", LONG)
    while not stack.cache.restore.fetches.of(stack._jobs["b"]):
        steps.next()
    before = len(reads(stack))
    stack.abort("a")
    stack.abort("b")
    steps.run()
    assert len(reads(stack)) - before <= 2  # those that the ranks had been given
    assert stack.cache.restore.fetches.tokens == 0
    assert stack.probe(LONG).l2 == 0
    at_rest(stack)


# -- a bound ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["load", "abort", "deadline"])
def test_tokens_in_flight_have_a_bound(end: str) -> None:
    """The second waits until the first has come to its end, whichever, and then has all of its own."""
    other = prompt(5, PAGE * 96 + 1)
    stack = Stack(page=PAGE, pools=KV, l1=300, l2=300, l3=4000, settings={"prefetch_tokens_in_flight": 1000}, prefetch_policy="timeout")
    for tokens in (LONG, other):
        stack.put(tokens)
        stack.settle()
    stack.flush()
    fetches = stack.cache.restore.fetches
    stack.prefetch("a", LONG)
    steps = Steps(stack)
    arrive(steps, 1)
    assert fetches.tokens == 768
    stack.prefetch("b", other)
    while stack.group._tales["b"].waits.__class__ is Lookup:
        steps.next()
    assert fetches.tokens == 768
    assert fetches.of(stack._jobs["b"]) == []
    if end == "abort":
        stack.abort("a")
    elif end == "deadline":
        steps.collect()
        steps.queue, held = [], steps.queue
        past(stack)
        while fetches.of(stack._jobs["a"]):
            past(stack)
        steps.queue = held + steps.queue
    steps.run()
    assert fetches.tokens == 0
    if end == "deadline":  # it had waited for as long as one waits for room, and took what fitted
        assert stack.poll("b").limit == Limit.IN_FLIGHT.value
        assert stack.poll("b").tokens == 1000 // PAGE * PAGE - 768
    else:
        assert stack.poll("b").tokens == 768
    for rid in ("a", "b"):
        stack.abort(rid)
    steps.settle()
    at_rest(stack)
