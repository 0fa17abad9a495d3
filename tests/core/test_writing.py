"""Write policies: when a page goes down, who waits for it, what is left for later, which snapshots of a path there are."""

from __future__ import annotations

import pytest

from hicache_ray.keys import space_of
from hicache_ray.records import Move
from hicache_ray.settings import StateSnapshots
from hicache_ray.spec import Tier
from hicache_ray.testing import Served, Stack, full, state, window
from tests.core.drive import Steps, all_bytes_are_right, at_rest, is_move, prompt

PAGE = 8
KV = {"full": full(layers=1)}


def down(stack: Stack) -> list[int]:
    """How many pages each copy to the host had."""
    moves = [e.record for e in stack.executed[0] if isinstance(e.record, Move) and e.record.target is Tier.HOST]
    return [sum(map(len, m.spans)) for m in moves if m.source is Tier.DEVICE]


# -- write_through_selective ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [1, 2, 3])
def test_a_page_is_backed_up_at_the_use_that_reaches_the_threshold(threshold: int) -> None:
    """Making it is the first use. The pages of a tail that nobody has used again stay where they are."""
    pools = {"full": full(layers=1), "swa": window(20, layers=1), "state": state(PAGE, layers=1)}
    settings = {"selective_threshold": threshold}
    stack = Stack(page=PAGE, pools=pools, write_policy="write_through_selective", settings=settings, l1=120, l2=120)
    root = prompt(1, 80)
    paths = [root + prompt(seed, 41) for seed in range(2, 2 + threshold)]
    for use, tokens in enumerate(paths, 1):
        stack.put(tokens)
        stack.settle()
        wanted = 120 if threshold == 1 else 80 if use == threshold else 0
        assert stack.probe(tokens).l2 == stack.probe(tokens).l3 == wanted
    assert len(stack.have("l2", "full", paths[0])) == (15 if threshold == 1 else 10)
    assert stack.have("l2", "state", paths[-1]) >= ({80} if threshold < 3 else set())
    # What leaves the device goes down at the latest then.
    stack.evict_l1(120)
    for tokens in paths:
        assert stack.probe(tokens).l2 == stack.probe(tokens).l3 == 120
    at_rest(stack)


# -- write_back without waiting -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("reserve", "waits"), [(0.0, 7), (0.34, 0)])
def test_who_needs_room_does_not_wait_for_a_copy(reserve: float, waits: int) -> None:
    """A device of 30 pages and requests of 10 pages each: with a reserve the pages that go next are down already."""
    settings = {"device_reserve": reserve}
    stack = Stack(page=PAGE, pools=KV, write_policy="write_back", l1=30, l2=200, ranks=2, settings=settings)
    paths = [prompt(seed, 80) for seed in range(10)]
    for i, tokens in enumerate(paths):
        stack.begin(tokens, f"r{i}")
        before = len(stack.executed[0])
        stack.settle()
        order = [type(e.record).__name__ + getattr(getattr(e.record, "target", None), "value", "") for e in stack.executed[0][before:]]
        assert ("Movehost" in order[: order.index("Compute")]) is (reserve == 0.0 and i > 2)
    assert stack.cache.descent.waits == waits
    assert all(stack.probe([*t, 0]).reusable == 80 for t in paths)
    assert stack.have("l1", "full", paths[-1]) == set(range(10))
    at_rest(stack)
    all_bytes_are_right(stack, paths)


def test_the_reserve_loses_nothing_where_the_host_is_full() -> None:
    """Without storage: what the host has alone is not given up for what the device still has."""
    settings = {"device_reserve": 1.0, "storage": False}
    stack = Stack(page=PAGE, pools=KV, write_policy="write_back", l1=30, l2=10, settings=settings)
    first, second = prompt(1, 80), prompt(2, 80)
    stack.put(first)
    stack.settle()
    stack.evict_l1(30)
    assert stack.have("l2", "full", first) == set(range(10))
    stack.put(second)
    stack.settle()
    assert stack.probe([*first, 0]).l2 == stack.probe([*second, 0]).l1 == 80
    assert stack.probe([*second, 0]).l2 == 0
    at_rest(stack)


# -- what is left for later ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["l2", "l3"])
def test_a_late_state_travels_alone(where: str) -> None:
    """The pages of the path are backed up and one snapshot is not: it goes down by itself."""
    pools = {"full": full(layers=1), "state": state(6 * PAGE, layers=1)}
    stack = Stack(page=PAGE, pools=pools, grid=2 * PAGE, ranks=2, l1=100, l2=100)
    path = prompt(1, 12 * PAGE + 1)
    stack.put(path)
    stack.settle()
    assert stack.have("l2", "state", path) == stack.have("l3", "state", path) == {48, 96}
    for tier in ("l2", "l3"):
        stack.drop(tier, "state", path, [48])
    if where == "l3":
        stack.res.index.set_durable((Tier.HOST, "state"), stack.res.index.in_place((Tier.DEVICE, "state")), False)
    before = len(stack.executed[0])
    stack.put(path)
    stack.settle()
    moves = [e.record for e in stack.executed[0][before:] if isinstance(e.record, Move)]
    down = [[(s.component, len(s)) for s in m.spans] for m in moves if m.target is not Tier.DEVICE]
    assert down == [[("state", 1)], [("state", 2)]] if where == "l3" else [[("state", 1)]]
    assert stack.have("l2", "state", path) == {48, 96}
    at_rest(stack)


def test_backups_on_their_way_to_storage_have_a_bound() -> None:
    """The store hangs: of three backups one is under way, two are dropped and counted, and the next use writes them."""
    page_bytes = Stack(page=PAGE, pools=KV).spec.components[0].page_bytes(PAGE)
    stack = Stack(page=PAGE, pools=KV, l1=100, l2=100, settings={"backup_bytes": 15 * page_bytes})
    paths = [prompt(seed, 80) for seed in range(3)]
    steps, held = Steps(stack), []
    for i, tokens in enumerate(paths):
        stack.begin(tokens, f"r{i}")
        while steps.queue or stack._inbox:
            steps.collect()
            held += [e for e in steps.queue if is_move(e, Tier.HOST, Tier.STORAGE)]
            steps.queue = [e for e in steps.queue if e not in held]
            steps.next()
    assert len(held) == 1
    counters = stack.res.counters[(Tier.STORAGE, "full")]
    assert (counters.dropped, counters.backups) == (20, 0)
    assert stack.cache.descent.persisting == 10 * page_bytes
    for envelope in held:
        stack.run(envelope)
    stack.settle()
    assert stack.cache.descent.persisting == 0
    assert [stack.probe([*t, 0]).l3 for t in paths] == [80, 0, 0]
    for tokens in paths:
        stack.put(tokens)
        stack.settle()
    assert [stack.probe([*t, 0]).l3 for t in paths] == [80, 80, 80]
    assert (counters.dropped, counters.backups) == (20, 30)
    at_rest(stack)


# -- which snapshots there are ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "first", "second"),
    [
        ("all", {8 * i for i in range(1, 17)}, {8 * i for i in range(1, 33)}),
        ("log", {64, 96, 112, 120, 128}, {128, 192, 224, 240, 248, 256}),
        ("last", {120, 128}, {248, 256}),
    ],
)
def test_snapshots_of_a_path(how: str, first: set[int], second: set[int]) -> None:
    """Of a path that grows from 128 to 256 tokens; in all tiers that the group rules, and the same prompt can always be resumed."""
    pools = {"full": full(layers=1), "state": state(PAGE, layers=1)}
    settings = {"state_snapshots": StateSnapshots(how)}
    stack = Stack(page=PAGE, pools=pools, l1=64, l2=64, settings=settings, ranks=2)
    tokens = prompt(1, 256)
    for n, kept in ((128, first), (256, second)):
        stack.put(tokens[:n])
        stack.settle()
        assert stack.have("l1", "state", tokens) == stack.have("l2", "state", tokens) == kept
        assert stack.probe(tokens[:n]).l2 == n - 8
        assert stack.probe([*tokens[:n], 0]).l2 == n
    at_rest(stack)


@pytest.mark.parametrize("how", ["log", "last"])
def test_a_state_is_kept_where_paths_part(how: str) -> None:
    """The second prompt leaves the first between two snapshots: it makes one there, and the third resumes from it. It is not thinned."""
    pools = {"full": full(layers=1), "state": state(layers=1)}
    settings = {"state_snapshots": StateSnapshots(how)}
    stack = Stack(page=PAGE, pools=pools, grid=16, exact=True, l1=120, l2=120, settings=settings, ranks=2)
    root = prompt(1, 100)
    stack.put(root + prompt(2, 300))
    stack.settle()
    at = stack.probe(root + prompt(3, 60)).reusable
    assert at < 96
    assert stack.put(root + prompt(3, 60)) == Served(at, 0, 0, 160 - at)
    stack.settle()
    assert stack.put(root + prompt(4, 60)) == Served(96, 0, 0, 64)
    stack.settle()
    longer = root + prompt(3, 200)
    stack.put(longer)
    stack.settle()
    assert 96 in stack.have("l1", "state", longer)
    assert stack.probe(root + prompt(5, 60)).l2 == stack.probe(root + prompt(5, 60)).l3 == 96
    at_rest(stack)
    all_bytes_are_right(stack, [root + prompt(2, 300), longer, root + prompt(3, 60), root + prompt(4, 60)])


def test_what_was_written_down_is_known_by_its_name() -> None:
    """While pages go down their namespace is dropped and the entries are others': those go down as well."""
    stack = Stack(page=8, pools={"full": full(layers=1)}, l1=24, l2=24, write_policy="write_back", settings={"device_reserve": 1.0})
    gone, new = prompt(1, 8 * 8 + 1), prompt(2, 8 * 8 + 1)
    stack.detach()
    stack.put(gone)
    steps = Steps(stack)
    copy = steps.until(lambda e: is_move(e, Tier.DEVICE, Tier.HOST))
    ids = set(stack.res.index.in_place((Tier.DEVICE, "full")).tolist())
    stack.group.drop_space(space_of(stack.ns.digest()), 10.0)
    other = {"revision": "two"}
    stack.put(new, namespace=other)
    assert set(stack.res.index.in_place((Tier.DEVICE, "full")).tolist()) == ids
    stack.run(copy)
    steps.settle()
    assert stack.probe(new, namespace=other).l2 == 8 * 8
    assert stack.probe(gone).reusable == 0
    at_rest(stack)


def test_a_load_that_is_done_again_finds_the_parting_anew() -> None:
    """The path that a prompt leaves is dropped while it loads: then there is no length for a state to be kept at."""
    pools = {"full": full(layers=1), "state": state(32, layers=1)}
    stack = Stack(page=8, pools=pools, l1=40, l2=40)
    shared = prompt(1, 16 * 8 + 1)
    stack.put(shared)
    stack.settle()
    stack.flush(l1=True, l2=False)
    stack.begin([*shared[: 9 * 8], *prompt(2, 60)], "r")
    steps = Steps(stack)
    load = steps.until(lambda e: is_move(e, Tier.HOST, Tier.DEVICE))
    assert stack._jobs["r"].fork == 64
    stack.group.drop_space(space_of(stack.ns.digest()), 10.0)
    stack.run(load)
    steps.settle()
    assert stack._jobs["r"].fork == 0
    assert stack.served["r"].computed == 132
    at_rest(stack)
