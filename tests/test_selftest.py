"""The layout self-test: silent where every byte arrives, and otherwise it names the axis."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hicache_ray.ask import tags_of
from hicache_ray.copies import Copier, Mover, choose
from hicache_ray.copies_fake import FakeDevice
from hicache_ray.errors import LayoutBroken, StoreError
from hicache_ray.executor import Executor, Rank
from hicache_ray.keys import ANY
from hicache_ray.layout import ORDERS
from hicache_ray.pool import Pool
from hicache_ray.records import Outcome, Record, Slots
from hicache_ray.selftest import PAGES, self_test
from hicache_ray.spec import CacheSpec, Component, Field, Kind, Shard, Tier
from hicache_ray.storage import CountingStore, FaultyStore
from hicache_ray.storage.memory import MemoryStore
from hicache_ray.store import Store
from hicache_ray.testing_queues import fake_mover

PAGE = 4
COMPONENTS = (
    Component("full", Kind.FULL, (Field("k", 4, 3), Field("v", 4, 3)), (0, 2, 3)),
    Component("latent", Kind.FULL, (Field("latent", 1, 9), Field("rope", 1, 2)), (0, 1), shard=Shard.REPLICATED),
    Component("packed", Kind.FULL, (Field("data", 2, 3, 1, "uint8"), Field("scale", 2, 1, 1, "uint8")), (0, 1)),
    Component("state", Kind.STATE, (Field("recurrent", 2, 12, 4, "float32", (3, 4)), Field("conv", 1, 6)), (1, 4)),
    Component("unlike", Kind.WINDOW, (Field("k", 2, 3), Field("v", 2, 5)), (1,), reach=5),
    Component("wide", Kind.FULL, (Field("entry", 1, 5),), (0, 1), page_span=2, ratio=8),
)
Spoil = Callable[[Pool, list[int]], None]


class Spoiled(Copier):
    """Copies, and then does something to the pages that have arrived."""

    spoil: Spoil

    def copy(self, source_slots: Slots, target_slots: Slots) -> None:
        super().copy(source_slots, target_slots)
        self.spoil(self.target, target_slots.tolist())


class SpoiledExecutor(Executor):
    """Spoils one component's pages between two tiers. Its copiers are made at its birth, so both are of a class of their own."""

    at: tuple[Tier, Tier, str]
    spoil: Spoil

    def _copier(self, source: Tier, target: Tier, component: str) -> Copier:
        made = super()._copier(source, target, component)
        if (source, target, component) != self.at:
            return made
        spoiled = Spoiled(made.source, made.target, made.mover)
        spoiled.spoil = self.spoil
        return spoiled


def spoiling(at: tuple[Tier, Tier, str], spoil: Spoil) -> type[SpoiledExecutor]:
    return type("SpoilingExecutor", (SpoiledExecutor,), {"at": at, "spoil": staticmethod(spoil)})


@pytest.fixture(scope="module")
def mover() -> Iterator[Mover]:
    with Mover(choose("auto", "cpu", "layer_first"), threads=1) as opened:
        yield opened


def made(
    mover: Mover, layout: str = "page_head", store: Store | None = None, ranks: int = 1, me: int = 0, slots: int = 7, kind: type = Executor
) -> tuple[Rank, Any]:
    spec = CacheSpec("test", PAGE, COMPONENTS, ranks)
    pools = {
        tier: {c.name: Pool(c, PAGE, n, order) for c in COMPONENTS}
        for tier, n, order in ((Tier.DEVICE, slots, "layer_first"), (Tier.HOST, slots + 2, layout))
    }
    rank = Rank(me, spec, pools, {name: tags[me] for name, tags in tags_of(spec, ANY).items()})

    def no_engine(_: object) -> Outcome:
        raise AssertionError

    return rank, kind(rank, mover, store, no_engine, lambda: 0.0)


@pytest.mark.parametrize("layout", ORDERS)
@pytest.mark.parametrize("slots", [1, 2, 7])
def test_a_sound_way_says_nothing_and_leaves_nothing(mover: Mover, layout: str, slots: int) -> None:
    store = CountingStore(MemoryStore(1 << 20))
    rank, executor = made(mover, layout, store, slots=slots)
    assert self_test(rank, executor, "once") == ""
    assert (store.stats(1.0).objects, list(store.scan())) == (0, [])
    # It was there: every page of every component, in each of the rounds.
    rounds, rest = divmod(store.stats(1.0).puts, min(PAGES, slots) * len(COMPONENTS))
    assert (rounds, rest) == (3, 0)


def test_ranks_of_one_group_read_what_they_wrote_themselves(mover: Mover) -> None:
    """A replicated page is written by one rank, chosen by its key; the self-test of each uses keys of its own."""
    store = MemoryStore(1 << 20)
    for me in range(3):
        rank, executor = made(mover, store=store, ranks=3, me=me)
        assert self_test(rank, executor, "once") == ""


def test_without_storage_the_rest_is_tested_and_a_note_says_so(mover: Mover) -> None:
    rank, executor = made(mover)
    assert self_test(rank, executor, "once") == "the self-test left storage out: it is not attached"


@pytest.mark.parametrize(("op", "did"), [("put", "take"), ("get", "give back")])
def test_storage_that_fails_is_left_out_with_a_note(mover: Mover, op: str, did: str) -> None:
    store = FaultyStore(MemoryStore(1 << 20))
    rank, executor = made(mover, store=store)
    store.fault(op, "error")
    note = self_test(rank, executor, "once")
    assert note.startswith(f"the self-test left storage out: it did not {did} all pages (")


def test_storage_that_is_full_is_left_out_with_a_note(mover: Mover) -> None:
    store = MemoryStore(64)
    rank, executor = made(mover, store=store)
    assert "did not take all pages" in self_test(rank, executor, "once")


def rows(pool: Pool, field: int = 0) -> Any:
    return pool.rows(pool.component.fields[field].name)


def roll(axis: int) -> Spoil:
    """Pages of which one axis is shifted by one. Axes of rows: slot, layer, token, head, byte."""

    def spoil(pool: Pool, slots: list[int]) -> None:
        for f in range(len(pool.component.fields)):
            rows(pool, f)[slots] = rows(pool, f)[slots].roll(1, axis)

    return spoil


def swap_fields(pool: Pool, slots: list[int]) -> None:
    k, v = rows(pool, 0)[slots].clone(), rows(pool, 1)[slots].clone()
    rows(pool, 0)[slots], rows(pool, 1)[slots] = v, k


def flip_a_bit(pool: Pool, slots: list[int]) -> None:
    """The low bit of the last byte of a page, once."""
    last = rows(pool)[slots[-1], -1, -1, -1]
    last[-1] = int(last[-1]) ^ 1


def lose_a_page(pool: Pool, slots: list[int]) -> None:
    rows(pool)[slots[-1]] = 0


def one_token_late(pool: Pool, slots: list[int]) -> None:
    """Only the last token of one layer, as an off-by-one at the end of a loop."""
    at = rows(pool, 1)[slots[0], -1]
    at[-1] = at[-2].clone()


def swap_two_heads(pool: Pool, slots: list[int]) -> None:
    """Heads 1 and 2 of one field, in one page only."""
    at = rows(pool, 1)[slots[1]]
    at[:, :, [1, 2]] = at[:, :, [2, 1]]


BROKEN: list[tuple[str, Spoil, str]] = [
    ("full", roll(3), "head"),
    ("full", swap_two_heads, "head"),
    ("full", roll(1), "layer"),
    ("full", roll(2), "token"),
    ("full", one_token_late, "token"),
    ("full", roll(0), "page"),
    ("full", swap_fields, "field"),
    ("full", flip_a_bit, "byte"),
    ("full", lose_a_page, "byte"),
    ("full", roll(4), "byte"),
    ("latent", roll(2), "token"),
    ("packed", flip_a_bit, "byte"),
    ("state", roll(1), "layer"),
    ("state", roll(0), "page"),
    ("unlike", roll(3), "head"),
    ("wide", roll(1), "layer"),
]


@pytest.mark.parametrize("layout", ["page_first_direct", "page_head"])
@pytest.mark.parametrize(("source", "target", "leg"), [
    (Tier.DEVICE, Tier.HOST, "from the device to the host"),
    (Tier.HOST, Tier.DEVICE, "from the host to the device"),
])  # fmt: skip
@pytest.mark.parametrize(("component", "spoil", "axis"), BROKEN)
def test_a_broken_copy_is_refused_by_its_axis(
    mover: Mover, layout: str, source: Tier, target: Tier, leg: str, component: str, spoil: Spoil, axis: str
) -> None:
    store = MemoryStore(1 << 20)
    rank, executor = made(mover, layout, store, kind=spoiling((source, target, component), spoil))
    with pytest.raises(LayoutBroken, match=rf"the way {leg}: the axis {axis} is wrong\. component '{component}', field"):
        self_test(rank, executor, "once")
    assert store.stats(1.0).objects == 0


class Confused(MemoryStore):
    """Gives the bytes of one object for those of another, with nothing to see it by."""

    def get(self, ids: Any, targets: Any, timeout_s: float) -> int:
        return super().get(list(ids)[::-1], targets, timeout_s)


@pytest.mark.parametrize("layout", ["page_first_direct", "page_head"])
def test_wrong_objects_from_storage_are_refused(mover: Mover, layout: str) -> None:
    store = Confused(1 << 20)
    rank, executor = made(mover, layout, store)
    with pytest.raises(LayoutBroken, match="from the host through storage and back: the axis page is wrong"):
        self_test(rank, executor, "once")


def test_components_that_change_places_are_told(mover: Mover) -> None:
    """Two components of one geometry in each other's place, as by a tag or a table mixed up."""
    twins = tuple(Component(name, Kind.FULL, (Field("k", 2, 3),), (0, 1)) for name in ("one", "two"))
    spec = CacheSpec("test", PAGE, twins)
    pools = {tier: {c.name: Pool(c, PAGE, 5) for c in twins} for tier in (Tier.DEVICE, Tier.HOST)}
    crossed = {**pools, Tier.DEVICE: {"one": pools[Tier.DEVICE]["two"], "two": pools[Tier.DEVICE]["one"]}}
    tags = {name: of[0] for name, of in tags_of(spec, ANY).items()}
    executor = Executor(Rank(0, spec, crossed, tags), mover, None, lambda _: Outcome(), lambda: 0.0)
    with pytest.raises(LayoutBroken, match="wrong"):
        self_test(Rank(0, spec, pools, tags), executor, "once")


class Stuck(Executor):
    def execute(self, record: Record) -> Outcome:
        return Outcome(error="no such luck")


def test_a_move_that_fails_is_refused_with_its_reason(mover: Mover) -> None:
    rank, executor = made(mover, kind=Stuck)
    with pytest.raises(LayoutBroken, match="could not move pages from the device to the host: no such luck"):
        self_test(rank, executor, "once")


@pytest.mark.parametrize("layout", ORDERS)
def test_on_a_device_with_queues_nothing_is_looked_at_too_early(layout: str) -> None:
    """Copies are enqueued there and take their time; a byte that is read or overwritten before they are done is a wrong one."""
    device = FakeDevice(lambda queue, label: 1.0)
    store = MemoryStore(1 << 20)
    with fake_mover(device) as queued:
        rank, executor = made(queued, layout, store)
        assert self_test(rank, executor, "once") == ""
    assert store.stats(1.0).objects == 0


def test_a_store_that_cannot_drop_is_noted(mover: Mover) -> None:
    class Sticky(MemoryStore):
        def drop(self, ids: Any, timeout_s: float) -> int:
            raise StoreError("it sticks")

    store = Sticky(1 << 20)
    rank, executor = made(mover, store=store)
    assert "could not drop its pages from storage, which will evict them: it sticks" in self_test(rank, executor, "once")
