"""What a group refuses, and what it waits for."""

from __future__ import annotations

import pytest

from hicache_ray.errors import Busy, CapacityError, ConfigError
from hicache_ray.group import Envelope
from hicache_ray.records import Compute
from hicache_ray.spec import Tier
from hicache_ray.story import Ended, Phase
from hicache_ray.testing import Served, Stack, chunked, full, state, window
from tests.core.drive import Steps, at_rest, ended, is_move, prompt


def test_the_queue_is_bounded() -> None:
    stack = Stack(max_requests=3)
    for i in range(3):
        stack.begin(prompt(i, 100), f"r{i}")
    for act in (stack.begin, lambda tokens, rid: stack.prefetch(rid, tokens)):
        with pytest.raises(Busy, match=r"3 requests are under way \(engine.max_queue\); try again later"):
            act(prompt(9, 100), "one more")
    stack.abort("r1")
    stack.step()  # it was waiting for a lookup
    stack.begin(prompt(9, 100), "one more")
    stack.settle()
    assert set(stack.served) == {"r0", "r2", "one more"}
    at_rest(stack)


def test_an_id_in_use_is_refused() -> None:
    stack = Stack()
    stack.begin(prompt(1, 100), "r")
    with pytest.raises(Busy, match='a request with the id "r" is under way'):
        stack.begin(prompt(1, 100), "r")
    stack.settle()
    stack.put(prompt(1, 100), "r")


@pytest.mark.parametrize("name", ["flush 1", "flush 2", "evict 1", "evict 2", "backup of r 1", "backup of r 2", "persist 1"])
def test_callers_may_use_the_names_of_the_groups_own_stories(name: str) -> None:
    stack = Stack(pools={"full": full()})
    stack.begin(prompt(1, 300), "r")
    stack.begin(prompt(2, 100), name)
    flush = stack.group.flush((Tier.DEVICE,), timeout_s=1000.0)
    stack.group.evict(Tier.DEVICE, {"full": 3})
    stack._collect()
    assert flush != name
    stack.settle()
    assert stack.served["r"].computed == 300
    assert stack.served[name].computed == 100
    assert ended(stack, flush)[0].error is None
    at_rest(stack)


def test_callers_cannot_cancel_what_is_not_theirs() -> None:
    stack = Stack()
    stack.put(prompt(1, 300), "r")
    steps = Steps(stack)
    own = [t for t in stack.group._tales if t.startswith("backup")]
    assert own
    for name in own:
        stack.abort(name)
    flush = stack.group.flush((Tier.DEVICE,), timeout_s=10.0)
    stack.abort(flush)
    steps.settle()
    assert ended(stack, flush)[0].error is None
    assert stack.probe(prompt(1, 300)).l2 == 256


def test_a_request_without_tokens() -> None:
    stack = Stack()
    with pytest.raises(CapacityError, match="a request needs at least one token; input_ids is empty"):
        stack.put([])
    assert stack.group.idle
    found = stack.probe([])
    assert (found.l1, found.l2, found.l3, found.reusable) == (0, 0, 0, 0)


def test_a_request_of_one_token() -> None:
    stack = Stack(pools={"full": full(), "state": state(64)})
    assert stack.put([5]) == Served(0, 0, 0, 1)
    assert stack.put([5], decoded=0) == Served(0, 0, 0, 1)
    stack.settle()
    at_rest(stack)


def test_a_request_that_can_never_fit() -> None:
    stack = Stack(pools={"full": full()}, l1=4)
    sentence = (
        "a request of 257 tokens with 1 new ones needs 5 slots of the device pool 'full', which has 4; "
        r"raise cache.device_tokens \(or cache.device_snapshots\), or send fewer tokens"
    )
    with pytest.raises(CapacityError, match=sentence):
        stack.put(prompt(1, 257))
    with pytest.raises(CapacityError, match="with 2 new ones needs 5 slots"):
        stack.put(prompt(1, 257), decoded=1)
    assert stack.put(prompt(1, 256)) == Served(0, 0, 0, 256)
    stack.settle()
    at_rest(stack)


@pytest.mark.parametrize("decoded", [0, 1, 63, 64, 65, 128])
def test_what_just_fits_always_runs(decoded: int) -> None:
    """Also a second time, resumed from a full host, with the device full of somebody else's pages."""
    pools = {"full": full(), "swa": window(100), "chunk": chunked(128), "state": state(64)}
    stack = Stack(pools=pools, l1=8, l2=16, ranks=2)
    mine, other = prompt(1, 384), prompt(2, 384)
    for _ in range(3):
        for tokens in (mine, other):
            served = stack.put(tokens, decoded=decoded)
            assert served.l1 + served.l2 + served.l3 + served.computed == 384 - decoded
            stack.settle()
    at_rest(stack)
    for pool in pools:
        assert stack.read(other, pool, 1) == stack.made(other, pool, 1)


def test_the_resumed_snapshot_counts_too() -> None:
    """384 tokens make 6 snapshots, one slot is the live state, one the snapshot that a second run resumes from."""
    with pytest.raises(CapacityError, match="needs 8 slots of the device pool 'state', which has 7"):
        Stack(pools={"full": full(), "state": state(64)}, l1=7).put(prompt(1, 384))


def full_device() -> tuple[Stack, list[Envelope], list[int]]:
    """A device whose pages are all on their way to the host, by a copy that does not come to its end."""
    stack = Stack(pools={"full": full()}, l1=8)
    copied = prompt(1, 512)
    stack.begin(copied, "first")
    steps = Steps(stack)
    copy = steps.until(lambda e: is_move(e, Tier.DEVICE, Tier.HOST))
    assert "first" in stack.served
    return stack, [copy], copied


def test_waiting_for_room_ends() -> None:
    stack, copies, copied = full_device()
    stack.begin(prompt(2, 400), "r")
    Steps(stack).run()
    assert stack._jobs["r"].phase is Phase.LOADING
    assert stack.group.next_deadline() == stack.clock() + 30.0
    stack.settle()
    assert isinstance(stack.errors["r"], CapacityError)
    assert "everything is in use by others; raise cache.device_tokens" in str(stack.errors["r"])
    stack.begin(prompt(2, 400), "again")
    Steps(stack).run()
    for envelope in copies:
        stack.run(envelope)
    stack.settle()
    assert stack.served["again"] == Served(0, 0, 0, 400)
    assert stack.have("l2", "full", copied) == set(range(8))
    at_rest(stack)


def test_waiting_for_room_can_be_cancelled_and_others_go_on() -> None:
    stack, copies, copied = full_device()
    stack.begin(prompt(2, 400), "large")
    stack.begin(copied[:300], "small")
    steps = Steps(stack)
    steps.run()
    assert not {"large", "small"} & {e.rid for e in stack.events if isinstance(e, Ended)}
    stack.abort("large")
    steps.run()
    assert "small" not in stack.served  # it needs a slot as well
    for envelope in copies:
        stack.run(envelope)
    steps.settle()
    assert stack.served["small"] == Served(256, 0, 0, 44)
    at_rest(stack)


@pytest.mark.parametrize("waiting", ["request", "prefetch", "held prefetch"])
def test_who_waits_for_the_device_does_not_keep_it_from_the_one_who_has_it(waiting: str) -> None:
    """The device is full of pages that those in the queue will resume from, and the first of the queue needs all of it."""
    stack = Stack(pools={"full": full()}, l1=8)
    cached = [prompt(seed, 200) for seed in (1, 2)]
    for tokens in cached:
        stack.put(tokens)
        stack.settle()
    steps = Steps(stack)
    if waiting == "held prefetch":
        for i, tokens in enumerate(cached):
            stack.prefetch(f"w{i}", tokens)
    stack.begin(prompt(5, 100), "now")
    steps.run(1)
    stack.begin(prompt(6, 512), "large")
    steps.run(1)
    for i, tokens in enumerate(cached):
        if waiting == "request":
            stack.begin(tokens, f"w{i}")
        elif waiting == "prefetch":
            stack.prefetch(f"w{i}", tokens)
            stack.group.proceed(f"w{i}")
    steps.settle()
    assert stack.clock() == 0.0  # nobody had to wait for a deadline
    assert stack.served["large"] == Served(0, 0, 0, 512)
    for i in range(2):
        if waiting == "request":
            served = stack.served[f"w{i}"]
            assert (served.l1 + served.l2, served.computed) == (192, 8)
        else:
            assert waiting == "prefetch" or stack.load(f"w{i}") == 192
            assert stack.poll(f"w{i}").tokens == 192
    steps.settle()
    at_rest(stack)


def test_two_that_make_room_at_once() -> None:
    """Evictions that wait for each other's rescues all end, and what they free is free."""
    stack = Stack(pools={"full": full(), "swa": window(70)}, l1=12, write_policy="write_back", ranks=2)
    for seed in range(3):
        stack.put(prompt(seed, 250))
    for need in (3, 12, 5, 12):
        stack.group.evict(Tier.DEVICE, {"full": need, "swa": need})
    stack._collect()
    stack.settle()
    assert stack.res.pools[(Tier.DEVICE, "full")].free == 12
    assert stack.have("l2", "full", prompt(0, 250)) == {0, 1, 2}
    at_rest(stack)


def test_only_one_request_computes_at_a_time() -> None:
    stack = Stack(pools={"full": full()})
    for i in range(4):
        stack.begin(prompt(i, 150), f"r{i}", decoded=70)
    steps = Steps(stack)
    steps.settle()
    rids = [e.record.rid for e in steps.seen if isinstance(e.record, Compute)]
    assert rids == sorted(rids)
    assert len(set(rids)) == 4


def test_bad_settings_are_refused_with_a_sentence() -> None:
    with pytest.raises(ConfigError, match="cache.grid is 100, which is not a multiple of cache.page_size 64; choose 64 or 128"):
        Stack(grid=100)
    with pytest.raises(ConfigError, match="cache.exact needs a grid"):
        Stack(exact=True)
    with pytest.raises(ConfigError, match="a snapshot every 128 tokens, which is not a multiple of cache.grid 256; choose 256 or 512"):
        Stack(exact=True, grid=256, pools={"state": state(128)})
    with pytest.raises(ConfigError, match="a snapshot every 100 tokens, which is not a multiple of cache.page_size 64; choose 64 or 128"):
        Stack(pools={"state": state(100)})
    with pytest.raises(ConfigError, match="component 'draft' is a draft component of states; a draft component has pages"):
        Stack(pools={"full": full(), "draft": state(128, role="draft")})
