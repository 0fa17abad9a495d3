"""A batch of one object takes the short way; whatever it leaves behind is what the long way leaves behind."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_ray.storage.descriptors import EXISTS, GRANTED
from hicache_ray.storage.ids import unpacked
from hicache_ray.storage.index import ArenaIndex, Limits
from hicache_ray.storage.slabs import BLOCK, SlabMap
from tests.storage.conftest import FakeClock
from tests.storage.objects import TAG, key, name

ME, OTHER = 1, 2
SLABS = 6
SIZES = (1, BLOCK // 2, BLOCK, 3 * BLOCK, (SLABS + 1) * BLOCK)
TENANT = key(7)[:8]
CLAIM = ("deadline", "owner", "rows", "order", "serials", "size")


class LongWay(ArenaIndex):
    singly = False


class Twins:
    """Two indices that are told the same."""

    def __init__(self, limits: Limits) -> None:
        self.clock = FakeClock()
        self.both = [kind(SlabMap(SLABS * BLOCK, BLOCK), [0] * SLABS, self.clock, limits) for kind in (ArenaIndex, LongWay)]
        self.leases: list[int] = []
        self.reservations: list[tuple[int, int]] = []  # (id, objects granted)

    def ask(self, method: str, *args: Any) -> Any:
        """What both answer."""
        one, other = (getattr(index, method)(*args) for index in self.both)
        assert _plain(one) == _plain(other)
        self.agree()
        return one

    def agree(self) -> None:
        for index in self.both:
            index.check()
        one, other = (_state(index) for index in self.both)
        assert one == other


def _plain(answer: Any) -> Any:
    if not hasattr(answer, "__dataclass_fields__"):
        return answer
    return {name: _listed(getattr(answer, name)) for name in answer.__dataclass_fields__}


def _listed(value: Any) -> Any:
    return (str(value.dtype), value.tolist()) if isinstance(value, np.ndarray) else value


def _state(index: ArenaIndex) -> dict[str, Any]:
    """All that an index remembers."""
    count = index.table._fresh  # rows beyond were never used
    claims = {**index.claims.leases, **index.claims.holds}
    return {
        **{name: index.table[name][:count].tolist() for name in index.table.cells},
        "ids": index.table._ids[:count].tolist(),
        "vacant": index.table.vacant.tolist(),
        "slabs": [list(cells) for cells in index.slabs.cells],
        "runs": {start: (run.slot_bytes, run.fresh, list(run.back)) for start, run in index.slabs.runs.items()},
        "generations": index.generations.tolist(),
        "tenants": index.tenants.report(),
        "kinds": index.kinds,
        "claims": {id: {name: _listed(getattr(claim, name)) for name in CLAIM} for id, claim in claims.items()},
        "counted": (index.counters, index.used_bytes, index.objects, index.tick, index.pending_bytes),
    }


STEPS = st.tuples(
    st.sampled_from(["reserve", "reserve", "seal", "lease", "release", "lookup", "drop", "clear", "later", "two"]),
    st.integers(0, 9),
    st.sampled_from((*SIZES, BLOCK, BLOCK)),
    st.sampled_from([ME, OTHER]),
    st.booleans(),
)
LIMITS = st.sampled_from([Limits(10.0, 10.0), Limits(10.0, 10.0, pending_bytes=2 * BLOCK), Limits(10.0, 10.0, None, {"t": 2 * BLOCK})])


@given(limits=LIMITS, named=st.booleans(), full=st.booleans(), steps=st.lists(STEPS, max_size=40))
@settings(max_examples=400, derandomize=True, deadline=None)
def test_both_ways_come_to_the_same(limits: Limits, named: bool, full: bool, steps: list[tuple[str, int, int, int, bool]]) -> None:
    twins = Twins(limits)
    if named:
        for index in twins.both:
            index.assign(TENANT, "t")
    for number in range(SLABS if full else 0):
        _put(twins, 20 + number)
    for what, number, size, owner, flag in steps:
        _step(twins, what, number, size, owner, flag)


def _step(twins: Twins, what: str, number: int, size: int, owner: int, flag: bool) -> None:
    ids = [name(number)]
    if what == "reserve" and number % 2:
        held = twins.ask("reserve_one", name(number), size, owner, 5.0)
        twins.reservations += [(held.id, 1)] if held.id else []
    elif what in ("reserve", "two"):
        ids = ids if what == "reserve" else [name(number), name(number + flag)]
        answer = twins.ask("reserve", ids, [size] * len(ids), owner, 5.0)
        twins.reservations += [(answer.id, len(answer.granted))] if answer.id else []
    elif what == "seal" and twins.reservations:
        id, granted = twins.reservations.pop(number % len(twins.reservations))
        if flag and granted == 1 and number % 3:
            twins.ask("seal_one", id, number, owner)
            return
        twins.ask("seal", id, [number if flag else None] * granted, owner)
    elif what == "lease" and number % 2:
        lent = twins.ask("lease_one", name(number), owner, 1e9 if flag else 1.0)
        twins.leases += [lent.id] if lent.id else []
    elif what == "lease":
        answer = twins.ask("lease", ids, owner, 1e9 if flag else 1.0)
        twins.leases += [answer.id] if answer.id else []
    elif what == "release" and twins.leases:
        twins.ask("release", twins.leases.pop(number % len(twins.leases)), int(flag))
    elif what == "lookup":
        twins.ask("lookup", [key(number), key(number + 1)], TAG)
    elif what == "drop":
        twins.ask("drop", ids)
    elif what == "clear" and flag:
        twins.ask("clear", name(number)[:1] if number else b"")
    elif what == "later":
        twins.clock.now += number / 2


def test_a_full_arena_gives_its_oldest_object_for_one_more() -> None:
    """What was used, leased or found meanwhile is passed over; so is everything once a run of another class is colder."""
    twins = Twins(Limits(10.0, 10.0))
    for index in twins.both:
        index.lost = []
    for number in range(SLABS):
        assert _put(twins, number)
    lent = twins.ask("lease_one", name(0), ME, 5.0)
    assert twins.ask("reserve_one", name(1), BLOCK, ME, 5.0).outcome == EXISTS
    assert [_put(twins, number) for number in (6, 7)] == [True, True]  # in the places of 2 and 3
    twins.ask("release", lent.id, 0)
    assert [_put(twins, number) for number in (8, 9)] == [True, True]
    for index in twins.both:
        assert [id for part in index.lost or [] for id in unpacked(part)] == [name(n) for n in (2, 3, 4, 5)]
        assert sorted(index.ids()) == sorted(name(n) for n in (0, 1, 6, 7, 8, 9))
        assert (index.counters.evictions, index.counters.puts, index.counters.put_refused) == (4, 10, 0)
    assert _put(twins, 10, 3 * BLOCK)  # has no class of its own yet
    assert _put(twins, 11)
    assert twins.both[0].objects == 4


def _put(twins: Twins, number: int, size: int = BLOCK) -> bool:
    held = twins.ask("reserve_one", name(number), size, ME, 5.0)
    return bool(held.outcome == GRANTED and twins.ask("seal_one", held.id, number, ME) == 1)


def test_the_serial_of_a_row_goes_on_from_its_end() -> None:
    """A row that was used two billion times counts on as 32 bits do."""
    twins = Twins(Limits(10.0, 10.0))
    for index in twins.both:
        index.table["serial"][0] = np.iinfo(np.int32).max
    answer = twins.ask("reserve", [name(1)], [BLOCK], ME, 5.0)
    assert twins.both[0].table["serial"][0] == np.iinfo(np.int32).min
    assert twins.ask("seal", answer.id, [7], ME) == 1
