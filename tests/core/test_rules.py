"""The promises of the one rule, kept by the whole of the core: what is backed up can be resumed from, what is evicted is not lost."""

from __future__ import annotations

import math
import random

import pytest

from hicache_ray import lengths
from hicache_ray.spec import Component, Kind, Tier
from hicache_ray.testing import Served, Stack, chunked, full, state, window
from tests.core.drive import all_bytes_are_right, at_rest, prompt
from tests.core.test_random import PAGE, pools, prompts

ALL_KINDS = {"full": full(), "swa": window(100), "chunk": chunked(192), "state": state(256), "wide": full(page_span=2)}


def last_legal(parts: dict[str, Component], page: int, asked: int, given: int, made: int, grid: int | None) -> int:
    """The longest resume of a prompt of ``asked`` tokens over a path of ``made`` tokens of which ``given`` were a prompt."""
    steps = [page * c.page_span for c in parts.values()] + [c.reach for c in parts.values() if c.kind is Kind.STATE]
    step = math.lcm(*steps, grid or 1)
    most = min(asked - 1, given // grid * grid if grid else made)
    return most // step * step


def right_bytes(stack: Stack, tokens: list[int]) -> None:
    for pool in stack.pools:
        for rank in range(stack.ranks):
            assert stack.read(tokens, pool, rank) == stack.made(tokens, pool, rank)


# -- backup closes under the rule ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_after_write_through_the_host_alone_and_storage_alone_can_resume(seed: int) -> None:
    rng = random.Random(seed)
    exact = rng.random() < 0.5
    grid = 3 * PAGE if exact else None
    parts = pools(rng, grid)
    stack = Stack(page=PAGE, pools=parts, ranks=rng.randint(1, 4), exact=exact, grid=grid)
    tokens = prompt(seed, rng.randint(1, 120))
    given = rng.randint(1, len(tokens))
    legal = {n: last_legal(parts, PAGE, n, given, len(tokens), grid) for n in (len(tokens), len(tokens) + 1, len(tokens) + 50)}
    longer = tokens + prompt(seed + 1000, 50)

    assert stack.put(tokens, decoded=len(tokens) - given) == Served(0, 0, 0, given)
    stack.settle()
    for n, k in legal.items():
        found = stack.probe(longer[:n])
        assert (found.l1, found.l2, found.l3, found.reusable) == (k, k, k, k)
    stack.flush(l1=True, l2=False)
    for n, k in legal.items():
        found = stack.probe(longer[:n])
        assert (found.l1, found.l2, found.l3) == (0, k, k)
    again = longer[: len(tokens) + 1]
    k = legal[len(tokens) + 1]
    assert stack.put(again) == Served(0, k, 0, len(again) - k)
    right_bytes(stack, again)
    stack.settle()
    stack.flush()
    for n in legal:
        assert stack.probe(longer[:n]).l3 >= legal[n]
    k = stack.probe(again).l3
    assert stack.put(again) == Served(0, 0, k, len(again) - k)
    right_bytes(stack, again)
    stack.settle()
    all_bytes_are_right(stack, [longer])
    at_rest(stack)


@pytest.mark.parametrize("seed", range(40))
def test_under_write_back_the_same_once_everything_has_left_the_device(seed: int) -> None:
    """Whatever the pools are evicted in: in any order, in pieces of any size."""
    rng = random.Random(seed)
    parts = pools(rng)
    stack = Stack(page=PAGE, pools=parts, l1=60, l2=200, ranks=rng.randint(1, 4), write_policy="write_back")
    paths = prompts(rng, 3)
    for tokens in paths:
        stack.put(tokens)
        stack.settle()
    assert all(stack.probe(t).l2 == 0 for t in paths)
    legal = {n: [stack.probe(t[: len(t) - n] + [7] * (n + 1)).reusable for t in paths] for n in (-1, 0, 3)}
    assert legal[-1] == [last_legal(parts, PAGE, len(t), len(t), len(t), None) for t in paths]
    pieces = [(name, n) for name in parts for n in rng.sample(range(1, 60), 4)]
    rng.shuffle(pieces)
    for name, n in pieces:
        stack.evict("l1", {name: n})
        assert [stack.probe(t).reusable for t in paths] == legal[-1]
    stack.evict_l1(60)
    assert all(pool.free == 60 for place, pool in stack.res.pools.items() if place[0] is Tier.DEVICE)
    for n, expected in legal.items():
        assert [stack.probe(t[: len(t) - n] + [7] * (n + 1)).l2 for t in paths] == expected
    stack.flush()
    for t, k in zip(paths, legal[-1], strict=True):
        assert stack.probe(t).l3 == k
        served = stack.put(t)
        assert served.l3 + served.l1 + served.l2 == k
        right_bytes(stack, t)
        stack.settle()
    at_rest(stack)


@pytest.mark.parametrize("room", range(1, 12))
def test_a_host_too_small_for_a_path_is_given_the_longest_resume_that_fits(room: int) -> None:
    parts = {"full": full(), "swa": window(100), "state": state(128)}
    stack = Stack(pools=parts, l2=room, settings={"storage": False})
    tokens = prompt(3, 641)
    stack.put(tokens)
    stack.settle()
    need = {k: max(len(lengths.needed(c, k, 64)) for c in stack.spec.components) for k in range(0, 11, 2)}
    fits = max(k for k, slots in need.items() if slots <= room)
    stack.flush(l1=True, l2=False)
    assert stack.probe(tokens).l2 == fits * 64 == room // 2 * 128
    assert stack.put(tokens).l2 == fits * 64
    right_bytes(stack, tokens)


@pytest.mark.parametrize("room", range(1, 12))
def test_a_path_longer_than_the_host_passes_through_it_to_storage(room: int) -> None:
    """L3 alone can resume at the last legal length, and the host keeps the longest resume that it has room for."""
    parts = {"full": full(), "swa": window(100), "state": state(128)}
    stack = Stack(pools=parts, l2=room)
    tokens = prompt(3, 641)
    stack.put(tokens)
    stack.settle()
    assert stack.probe(tokens).l3 == 640
    assert stack.probe(tokens).l2 == min(room, 10) // 2 * 128
    assert [stack.res.counters[(Tier.HOST, name)].refused for name in parts] == [0, 0, 0]
    at_rest(stack)


def test_what_a_backup_could_not_store_is_stored_at_the_next_touch() -> None:
    """L3 fails for a while; the host holds what it can, and the next request over the path writes what is missing."""
    stack = Stack(pools={"full": full(), "swa": window(100)}, ranks=2)
    tokens = prompt(1, 641)
    assert stack.store is not None
    stack.store.fault("put", "error", 1)
    stack.store.fault("put", "error", 2)
    stack.put(tokens)
    stack.settle()
    assert stack.probe(tokens).l3 == 0
    assert stack.probe(tokens).l2 == 640
    stack.put(tokens)
    stack.settle()
    assert stack.probe(tokens).l3 == 640


def test_what_storage_has_lost_is_stored_again_when_a_lookup_tells() -> None:
    stack = Stack(pools={"full": full()}, ranks=2)
    tokens = prompt(1, 641)
    stack.put(tokens)
    stack.settle()
    stack.drop("l3", "full", tokens, [2, 3], rank=1)
    assert stack.probe(tokens).l3 == 128
    stack.put(tokens + prompt(2, 100))
    stack.settle()
    assert stack.probe(tokens).l3 == 640


@pytest.mark.parametrize("kind", ["flip", "torn", "gone", "error"])
def test_what_storage_could_not_read_is_recomputed_and_stored_again(kind: str) -> None:
    """Also where the entry is known through another component's page, which is still cached."""
    stack = Stack(pools={"full": full(), "swa": window(1000)})
    tokens = prompt(1, 641)
    stack.put(tokens)
    stack.settle()
    stack.evict("l1", {"full": 64})
    stack.evict("l2", {"full": 64})
    assert (stack.probe(tokens).l2, stack.probe(tokens).l3) == (0, 640)
    assert stack.store is not None
    stack.store.fault("get", kind, only=None if kind == "error" else [4])
    served = stack.put(tokens)
    assert served == (Served(0, 0, 0, 641) if kind == "error" else Served(0, 0, 256, 385))
    right_bytes(stack, tokens)
    stack.settle()
    stack.flush()
    assert stack.probe(tokens).l3 == 640
    assert stack.put(tokens) == Served(0, 0, 640, 1)
    right_bytes(stack, tokens)
    stack.settle()
    all_bytes_are_right(stack, [tokens])
    at_rest(stack)


# -- eviction ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", range(0, 120, 30))
@pytest.mark.parametrize("small_host", [False, True])
def test_no_eviction_loses_a_resume_while_storage_has_room(first: int, small_host: bool) -> None:
    """Random programs, per pool and of any size; also where the host cannot take all victims of one eviction at once."""
    for seed in range(first, first + 30):
        rng = random.Random(seed)
        parts, l1 = pools(rng), rng.randint(26, 40)
        l2 = rng.randint(6, l1) if small_host else l1 + rng.randint(0, 10)
        policy = rng.choice(["write_through", "write_back"])
        stack = Stack(page=PAGE, pools=parts, l1=l1, l2=l2, l3=10_000, ranks=rng.choice([1, 2]), write_policy=policy)
        paths = prompts(rng)
        for _ in range(10):
            before = [stack.probe([*t, 0]).reusable for t in paths]
            if rng.random() < 0.5:
                tokens = rng.choice(paths)
                stack.put(tokens, decoded=rng.randint(0, min(20, len(tokens) - 1)))
            else:
                stack.evict(rng.choice(["l1", "l2"]), {name: rng.randint(0, l1) for name in parts})
            stack.settle()
            after = [stack.probe([*t, 0]).reusable for t in paths]
            assert all(a >= b for a, b in zip(after, before, strict=True)), f"seed {seed}: {before} became {after}"
        at_rest(stack)


@pytest.mark.parametrize("first", range(0, 120, 60))
def test_no_eviction_loses_a_page_for_which_the_host_has_a_free_slot(first: int) -> None:
    """Without L3, pool by pool: that another pool of the host is full is no reason to lose pages of this one."""
    tested = 0
    for seed in range(first, first + 60):
        rng = random.Random(seed)
        parts, l1, l2 = pools(rng), rng.randint(26, 40), rng.randint(10, 60)
        policy = rng.choice(["write_through", "write_back"])
        stack = Stack(page=PAGE, pools=parts, l1=l1, l2=l2, write_policy=policy, settings={"storage": False})
        paths = prompts(rng)
        for _ in range(10):
            stack.put(rng.choice(paths))
            stack.settle()
            before = {name: cached(stack, name) for name in parts}
            free = {name: stack.res.pools[(Tier.HOST, name)].free for name in parts}
            copied = {name: stack.res.counters[(Tier.HOST, name)].backups for name in parts}
            stack.evict("l1", {name: rng.randint(0, l1) for name in parts})
            for name in parts:
                was, now = before[name], cached(stack, name)
                leaving = was[Tier.DEVICE] - now[Tier.DEVICE] - was[Tier.HOST]
                copies = stack.res.counters[(Tier.HOST, name)].backups - copied[name]
                if max(len(leaving), copies) <= free[name]:
                    tested += bool(leaving)
                    assert now[Tier.DEVICE] | now[Tier.HOST] >= was[Tier.DEVICE] | was[Tier.HOST], f"seed {seed}: {name}"
            stack.evict("l2", {name: rng.randint(0, l2) for name in parts})
        at_rest(stack)
    assert tested > 50


def cached(stack: Stack, name: str) -> dict[Tier, set[bytes]]:
    index = stack.res.index
    return {t: {index.key(e) for e in index.in_place((t, name)).tolist()} for t in (Tier.DEVICE, Tier.HOST)}


@pytest.mark.parametrize(
    ("component", "order"),
    [(full(), [8, 7, 6, 5, 4, 3, 2, 1, 0]), (window(64), [1, 3, 5, 7, 2, 6, 4, 0, 8]), (state(64), [1, 3, 5, 7, 2, 6, 4, 0, 8])],
    ids=["full", "window", "state"],
)
def test_what_left_the_device_leaves_the_host_in_the_same_order(component: Component, order: list[int]) -> None:
    """The deepest full page first, inner windows and snapshots thinned, those of the last length last: also after a rescue."""
    stack = Stack(pools={"base": full(), "one": component}, write_policy="write_back", settings={"storage": False})
    tokens = prompt(1, 64 * 9 + 1)
    stack.put(tokens)
    stack.settle()
    stack.evict_l1(64)
    here = stack.have("l2", "one", tokens)
    assert len(here) == 9
    for n, page in enumerate(order, 1):
        stack.evict("l2", {"one": 64 - 9 + n})
        left = stack.have("l2", "one", tokens)
        assert here - left == {(page + 1) * 64 if component.kind is Kind.STATE else page}
        here = left


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize("seed", range(10))
def test_what_stays_in_a_tier_can_be_reached_from_the_root(seed: int, policy: str) -> None:
    """A conversation grows turn by turn; what is not evicted then, with its copies below, are the first full pages."""
    rng = random.Random(seed)
    stack = Stack(page=PAGE, pools={"full": full(layers=1), "state": state(PAGE, layers=1)}, ranks=2, write_policy=policy)
    whole, other = prompt(seed, 300), prompt(seed + 50, 40)
    turns = sorted(rng.sample(range(10, 280), 4))
    for turn in turns:
        act = rng.randrange(4)
        if act == 0:
            stack.evict_l1(64)
        elif act == 1:
            stack.flush(l1=rng.random() < 0.5, l2=True)
        elif act == 2:
            stack.prefetch("p", whole[:turn])
            stack.settle()
            if rng.random() < 0.5:
                stack.load("p")
            stack.abort("p")
            stack.settle()
        stack.put(whole[:turn])
        stack.settle()
    for tier, place in (("l2", Tier.HOST), ("l1", Tier.DEVICE)):
        for _ in range(4):
            pool = stack.res.pools[(place, "full")]
            if rng.random() < 0.3:
                stack.put(other)
            stack.evict(tier, {"full": pool.free + rng.randint(1, 8)})
            stack.settle()
            # Copies of what the host has leave the device first; what they lead to is then reached through the host.
            have = stack.have(tier, "full", whole) | stack.have("l2", "full", whole)
            assert have == set(range(len(have)))
    at_rest(stack)


def test_windows_and_snapshots_go_when_the_page_under_them_has_gone() -> None:
    stack = Stack(pools={"full": full(), "swa": window(64), "state": state(64)}, settings={"storage": False}, write_policy="write_back")
    tokens = prompt(1, 64 * 9 + 1)
    stack.put(tokens)
    stack.settle()
    stack.flush(l1=False, l2=True)
    stack.evict("l1", {"full": 64})
    stack.evict("l2", {"full": 64 - 7})  # the two deepest full pages are nowhere any more
    stack.evict("l1", {"swa": 64 - 7, "state": 64 - 7})
    assert stack.have("l1", "swa", tokens) == set(range(7))
    assert stack.have("l1", "state", tokens) == {64 * i for i in range(1, 8)}


def test_a_running_request_frees_no_window_page_and_no_snapshot_of_its_path() -> None:
    stack = Stack(pools={"full": full(), "swa": window(64), "chunk": chunked(128), "state": state(128)})
    tokens = prompt(1, 1000)
    stack.put(tokens, decoded=300)
    assert stack.have("l1", "swa", tokens) == stack.have("l1", "chunk", tokens) == set(range(15))
    assert stack.have("l1", "state", tokens) == {128 * i for i in range(1, 8)}
