"""The story of a request, disturbed at every one of its steps."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from hicache_ray.errors import Cancelled, EngineError, GroupLost, HiCacheError
from hicache_ray.group import Envelope
from hicache_ray.records import Clear, Compute, Digest, Lookup, Move, Outcome, Record, lane_of
from hicache_ray.spec import Tier
from hicache_ray.story import Ended
from hicache_ray.testing import Served
from tests.core.drive import Steps, all_bytes_are_right, at_rest, ended, is_move, prompt
from tests.core.scenes import CROWDED, DIGESTS, FETCH, PREFETCH, SCENES, A, B, Scene, all_is_well_and_the_next_request_too, go_on

scenes = pytest.mark.parametrize("scene", SCENES, ids=lambda s: s.name)


def kinds(records: list[Record]) -> list[str]:
    return [f"{r.source.value} to {r.target.value}" if isinstance(r, Move) else type(r).__name__ for r in records]


def test_the_undisturbed_stories() -> None:
    """What the scenes below are made of; each step that exists is in one of them."""
    end = ["device to host", "host to storage"]
    decode = ["Compute"] * 3
    assert kinds(FETCH.records()) == ["Lookup", "storage to host", "host to device", *decode, *end]
    assert kinds(DIGESTS.records()) == ["Lookup", "storage to host", "host to device", *decode, "Digest", *end]
    assert kinds(PREFETCH.records()) == ["Lookup", "storage to host", "host to device"]
    crowded = kinds(CROWDED.records())
    assert crowded[:2] == ["Lookup", "device to host"]
    assert crowded.count("Compute") == 3
    assert "host to storage" in crowded


@scenes
def test_cancelled_after_every_envelope(scene: Scene) -> None:
    """Before the first, after the last, and between the reports of the ranks."""
    total = scene.play(scene.started())
    assert total >= 5
    cancelled = 0
    for count in range(total + 1):
        steps = scene.started()
        assert scene.play(steps, count) == count
        steps.stack.abort("r")
        steps.settle()
        (end,) = ended(steps.stack, "r")
        assert isinstance(end.error, Cancelled) or (end.error is None and (end.report is not None or scene is PREFETCH))
        cancelled += end.error is not None
        all_is_well_and_the_next_request_too(scene, steps.stack)
    assert cancelled >= 5


@scenes
def test_cancelled_twice_and_when_it_is_over(scene: Scene) -> None:
    steps = scene.started()
    scene.play(steps, 2)
    steps.stack.abort("r")
    steps.stack.abort("r")
    steps.settle()
    steps.stack.abort("r")
    steps.stack.abort("nobody")
    assert len(ended(steps.stack, "r")) == 1
    all_is_well_and_the_next_request_too(scene, steps.stack)


def worse(outcome: Outcome, how: str) -> Outcome:
    if how == "nothing but an error":
        return Outcome(error="injected")
    if how == "no bits":
        return replace(outcome, bits=tuple(0 for _ in outcome.bits), error="injected")
    if how == "no bits and no word":
        return replace(outcome, bits=tuple(0 for _ in outcome.bits), found={})
    fewer = {name: tuple(b >> 1 for b in found) for name, found in outcome.found.items()}
    return replace(outcome, bits=tuple(b & 0x5555555555 for b in outcome.bits), found=fewer)


@scenes
@pytest.mark.parametrize("how", ["nothing but an error", "no bits", "no bits and no word", "every other bit"])
def test_failed_at_every_record_on_one_rank(scene: Scene, how: str) -> None:
    """A copy or a read that fails is recomputed; only a failed compute fails its own request. Nothing that failed is published."""
    for n, record in enumerate(scene.records()):
        steps = scene.started()
        target = {"id": record.id}

        def spoil(envelope: Envelope, outcome: Outcome, target: dict[str, int] = target, victim: int = n % 2) -> Outcome:
            return worse(outcome, how) if envelope.record.id == target["id"] and envelope.rank in (victim, -1) else outcome

        assert _play_spoiled(scene, steps, spoil) > 0
        steps.settle()
        (end,) = ended(steps.stack, "r")
        if isinstance(record, Compute) and how in ("nothing but an error", "no bits"):
            assert isinstance(end.error, EngineError)
            assert "injected" in str(end.error)
        else:
            assert end.error is None
            if end.report is not None:
                r = end.report
                assert r.device + r.host + r.storage + r.computed == len(B) - 70
        all_is_well_and_the_next_request_too(scene, steps.stack)


def _play_spoiled(scene: Scene, steps: Steps, spoil: object) -> int:
    done = 0
    while steps.next(spoil) is not None:  # type: ignore[arg-type]
        done += 1
    if scene is PREFETCH:
        go_on(steps.stack)
        while steps.next(spoil) is not None:  # type: ignore[arg-type]
            done += 1
    return done


@scenes
def test_every_record_fails_on_every_rank(scene: Scene) -> None:
    """All but the computing: the request is served all the same, from nothing."""
    steps = scene.started()

    def spoil(envelope: Envelope, outcome: Outcome) -> Outcome:
        return outcome if isinstance(envelope.record, Compute) else worse(outcome, "nothing but an error")

    _play_spoiled(scene, steps, spoil)
    steps.settle()
    (end,) = ended(steps.stack, "r")
    assert end.error is None
    all_is_well_and_the_next_request_too(scene, steps.stack)


@scenes
def test_reports_in_any_order_and_more_than_once(scene: Scene) -> None:
    """Ranks execute records of one kind in their order; what they report may come late, twice, and before that of another rank."""
    expected: list[Ended] | None = None
    for seed in range(12):
        rng = random.Random(seed)
        steps = scene.started()
        stack = steps.stack
        waiting: dict[tuple[int, str], list[Envelope]] = {}
        reports: list[tuple[Envelope, Outcome]] = []
        old: list[tuple[Envelope, Outcome]] = []
        proceeded = False
        while True:
            for envelope in stack.pending():
                waiting.setdefault((envelope.rank, lane_of(envelope.record)), []).append(envelope)
            ready = [lane for lane, queue in waiting.items() if queue]
            if ready and (not reports or rng.random() < 0.5):
                envelope = waiting[rng.choice(ready)].pop(0)
                reports.append((envelope, stack.execute(envelope)))
            elif reports:
                one = reports.pop(rng.randrange(len(reports)))
                stack.report(*one)
                old.append(one)
                stack.report(*rng.choice(old))
            elif scene is PREFETCH and not proceeded:
                proceeded = True
                go_on(stack)
            else:
                break
        steps.settle()
        for one in old:
            stack.report(*one)
        assert expected is None or ended(stack, "r") == expected
        expected = ended(stack, "r")
        all_is_well_and_the_next_request_too(scene, stack)


def test_reports_of_another_incarnation_are_ignored() -> None:
    for wrong in (0, 2):
        steps = FETCH.started()
        steps.collect()
        while steps.queue:
            envelope = steps.queue.pop(0)
            outcome = steps.stack.execute(envelope)
            before = (len(steps.stack.events), steps.stack.res.leases.open())
            foreign = replace(outcome, bits=(0,) * len(outcome.bits), error="from another life")
            steps.stack.group.report(envelope.rank, envelope.record.id, wrong, foreign)
            assert not steps.stack.pending()
            assert (len(steps.stack.events), steps.stack.res.leases.open()) == before
            steps.stack.report(envelope, outcome)
            steps.collect()
        assert steps.stack.served["r"] == Served(0, 0, 640, 130)
        all_is_well_and_the_next_request_too(FETCH, steps.stack)


def test_reports_of_strangers_are_ignored() -> None:
    steps = FETCH.started()
    (lookup,) = steps.stack.pending()
    assert isinstance(lookup.record, Lookup)
    for rank, record_id in ((0, lookup.record.id), (7, lookup.record.id), (-1, 10_000), (-1, 1)):
        steps.stack.group.report(rank, record_id, 1, Outcome(error="a stranger"))
        assert not steps.stack.pending()
    steps.stack.run(lookup)
    steps.settle()
    assert steps.stack.served["r"] == Served(0, 0, 640, 130)


def test_two_requests_with_the_same_prompt() -> None:
    """The second waits for the device and then takes what the first has made."""
    steps = FETCH.started()
    steps.stack.begin(B, "twin", decoded=70)
    steps.settle()
    assert steps.stack.served["r"] == Served(0, 0, 640, 130)
    assert steps.stack.served["twin"] == Served(128, 0, 640, 2)  # it had waited for the same pages from storage
    all_is_well_and_the_next_request_too(FETCH, steps.stack)


def test_pages_that_never_arrived_do_not_count_for_storage() -> None:
    """The read that two share brings nothing; what the second resumes from is what the other has made."""
    steps = FETCH.started()
    steps.stack.begin(B, "twin", decoded=70)

    def spoil(envelope: Envelope, outcome: Outcome) -> Outcome:
        read = isinstance(envelope.record, Move) and envelope.record.source is Tier.STORAGE
        return worse(outcome, "no bits") if read else outcome

    steps.run(spoil=spoil)
    assert steps.stack.served["r"] == Served(0, 0, 0, 770)
    assert steps.stack.served["twin"] == Served(768, 0, 0, 2)
    steps.settle()
    all_is_well_and_the_next_request_too(FETCH, steps.stack)


def test_two_prefetches_of_the_same_prompt_share_one_fetch() -> None:
    """The second begins before anything has arrived: it waits for the pages of the first, and takes no host memory of its own."""
    steps = PREFETCH.started()
    stack = steps.stack
    stack.prefetch("other", B)
    steps.run()
    assert [stack.poll(rid).state for rid in ("r", "other")] == ["ready", "ready"]
    assert [stack.poll(rid).tokens for rid in ("r", "other")] == [640, 640]
    stack.audit()
    assert len({e.record.id for e in steps.seen if is_move(e, Tier.STORAGE, Tier.HOST)}) == 1
    assert stack.cache.restore.fetches.counters.shared == 1
    assert stack.load("r") == 640
    assert stack.load("other") == 640
    steps.settle()
    all_is_well_and_the_next_request_too(PREFETCH, stack)


def test_the_failure_of_one_request_does_not_touch_another() -> None:
    for failing in ("r", "other"):
        steps = FETCH.started()
        other = prompt(9, 300)
        steps.stack.begin(other, "other", decoded=3)

        def spoil(envelope: Envelope, outcome: Outcome, failing: str = failing) -> Outcome:
            return Outcome(error="injected") if isinstance(envelope.record, Compute) and envelope.record.rid == failing else outcome

        steps.run(spoil=spoil)
        steps.settle()
        good = "other" if failing == "r" else "r"
        assert isinstance(steps.stack.errors[failing], EngineError)
        assert good not in steps.stack.errors
        assert steps.stack.served[good] == (Served(0, 0, 0, 297) if good == "other" else Served(0, 0, 640, 130))
        all_bytes_are_right(steps.stack, (A, B, other))
        at_rest(steps.stack)


def test_the_group_is_lost_at_every_step() -> None:
    """Whatever each story waits for, it ends once, with GroupLost; nothing is asked of the ranks any more."""
    for scene in SCENES:
        total = scene.play(scene.started())
        for count in range(total + 1):
            steps = scene.started()
            scene.play(steps, count)
            stack = steps.stack
            stack.begin(prompt(8, 90), "queued")
            over = {e.rid for e in stack.events if isinstance(e, Ended)}
            stack.group.lose("rank 1 was killed")
            stack._collect()
            ends = [e for e in stack.events if isinstance(e, Ended)]
            assert len(ends) == len({e.rid for e in ends})
            for end in ends:
                assert end.rid in over or isinstance(end.error, GroupLost)
            assert {"queued", "r"} <= {e.rid for e in ends}
            assert stack.group.idle
            assert not stack.pending() or not stack.group.take()
            stack.audit()


def test_ranks_that_sample_different_tokens_lose_the_group() -> None:
    steps = FETCH.started()
    compute = steps.until(lambda e: isinstance(e.record, Compute))
    steps.stack.report(compute, steps.stack.execute(compute))
    other = steps.until(lambda e: isinstance(e.record, Compute))
    assert (compute.rank, other.rank) == (0, 1)
    outcome = steps.stack.execute(other)
    with pytest.raises(GroupLost, match="different tokens"):
        steps.stack.report(other, replace(outcome, output=(outcome.output[0] + 1,)))
    steps.stack.group.lose("the ranks have parted")
    steps.stack._collect()
    assert isinstance(steps.stack.errors["r"], GroupLost)


@pytest.mark.parametrize("output", [(), (1,), (1,) * 100])
def test_an_engine_that_samples_too_few_or_too_many_tokens_fails_the_request(output: tuple[int, ...]) -> None:
    """It would go on for ever, or publish pages under keys of other tokens."""
    steps = FETCH.started()

    def spoil(envelope: Envelope, outcome: Outcome) -> Outcome:
        second = isinstance(envelope.record, Compute) and envelope.record.start > 640
        return replace(outcome, output=output, logprobs=(0.0,) * len(output)) if second else outcome

    steps.run(spoil=spoil)
    steps.settle()
    assert isinstance(steps.stack.errors["r"], EngineError)
    assert f"sampled {len(output)} tokens where" in str(steps.stack.errors["r"])
    all_is_well_and_the_next_request_too(FETCH, steps.stack)


def test_only_known_records_exist() -> None:
    """So that a new kind of record cannot escape the tests above."""
    assert set(Record.__args__) == {Move, Lookup, Compute, Digest, Clear}  # type: ignore[attr-defined]


def test_proceeding_with_what_is_not_held_is_refused() -> None:
    steps = PREFETCH.started()
    for rid in ("r", "nobody"):
        with pytest.raises(HiCacheError, match="nothing is held"):
            steps.stack.group.proceed(rid)
    steps.settle()
    assert steps.stack.load("r") == 640
