"""The index of a cache group against dicts, with ``check()`` after every step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hicache_ray.errors import Inconsistent
from hicache_ray.index import ABSENT, Index, from_bits, to_bits
from hicache_ray.lease import Place
from hicache_ray.records import slots_array
from hicache_ray.spec import Tier
from hicache_ray.store import KEY_BYTES

DEVICE: Place = (Tier.DEVICE, "full")
HOST: Place = (Tier.HOST, "full")
STATE: Place = (Tier.HOST, "state")
KEYS = [bytes([i]) * KEY_BYTES for i in range(90)]


class IndexMachine(RuleBasedStateMachine):
    """Twin: per place a dict from key to slot, and a set of what is said to be durable."""

    def __init__(self) -> None:
        super().__init__()
        self.index = Index([DEVICE, HOST, STATE])
        self.twin: dict[Place, dict[bytes, int]] = {DEVICE: {}, HOST: {}, STATE: {}}
        self.durable: set[tuple[Place, bytes]] = set()
        self.next_slot = 0

    def live(self) -> set[bytes]:
        return {key for place in self.twin.values() for key in place}

    @rule(place=st.sampled_from([DEVICE, HOST, STATE]), chosen=st.lists(st.sampled_from(KEYS), max_size=40, unique=True))
    def put(self, place: Place, chosen: list[bytes]) -> None:
        fresh = [k for k in chosen if k not in self.twin[place]]
        slots = list(range(self.next_slot, self.next_slot + len(fresh)))
        self.next_slot += len(fresh)
        got = self.index.put(place, fresh, slots_array(slots))
        self.twin[place].update(zip(fresh, slots, strict=True))
        assert [self.index.key(e) for e in got.tolist()] == fresh

    @rule(data=st.data(), place=st.sampled_from([DEVICE, HOST, STATE]))
    def remove(self, data: st.DataObject, place: Place) -> None:
        chosen = data.draw(st.lists(st.sampled_from(KEYS), max_size=30, unique=True))
        chosen = [k for k in chosen if k in self.twin[place]]
        gone = self.index.remove(place, self.index.find(chosen))
        assert gone.tolist() == [self.twin[place].pop(k) for k in chosen]
        self.durable = {(p, k) for p, k in self.durable if k in self.live()}

    @precondition(lambda self: self.live())
    @rule(data=st.data(), place=st.sampled_from([HOST, STATE]))
    def set_durable(self, data: st.DataObject, place: Place) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.live())), max_size=5, unique=True))
        self.index.set_durable(place, self.index.find(chosen))
        self.durable |= {(place, k) for k in chosen}

    @rule()
    def clear_durable(self) -> None:
        self.index.clear_durable()
        self.durable.clear()

    @precondition(lambda self: self.live())
    @rule(data=st.data(), place=st.sampled_from([DEVICE, HOST, STATE]))
    def misuse(self, data: st.DataObject, place: Place) -> None:
        key = data.draw(st.sampled_from(sorted(self.live())))
        if key in self.twin[place]:
            with pytest.raises(Inconsistent, match="already in"):
                self.index.put(place, [key], slots_array([self.next_slot]))
        else:
            with pytest.raises(Inconsistent, match="not in"):
                self.index.remove(place, self.index.find([key]))

    @invariant()
    def agrees(self) -> None:
        self.index.check()
        assert len(self.index) == len(self.live())
        found = self.index.find(KEYS)
        assert [e != ABSENT for e in found.tolist()] == [k in self.live() for k in KEYS]
        for place, twin in self.twin.items():
            slots = [twin.get(k, ABSENT) for k in KEYS]
            assert self.index.slots(place, found).tolist() == slots
            assert self.index.present(place, found) == sum(1 << i for i, s in enumerate(slots) if s != ABSENT)
            assert sorted(self.index.key(e) for e in self.index.in_place(place).tolist()) == sorted(twin)
            known = [k for k in KEYS if k in self.live()]
            assert self.index.durable(place, self.index.find(known)).tolist() == [(place, k) in self.durable for k in known]


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(deadline=None, derandomize=True, max_examples=30, stateful_step_count=25)


def test_an_entry_that_is_gone_has_no_key() -> None:
    index = Index([DEVICE])
    entry = int(index.put(DEVICE, [KEYS[0]], slots_array([0]))[0])
    index.remove(DEVICE, index.find([KEYS[0]]))
    with pytest.raises(Inconsistent, match="is gone"):
        index.key(entry)


def test_two_entries_in_one_slot_are_found() -> None:
    index = Index([DEVICE])
    index.put(DEVICE, KEYS[:2], slots_array([3, 3]))
    with pytest.raises(Inconsistent, match="share a slot"):
        index.check()


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 64, 65])
def test_bitsets_there_and_back(count: int) -> None:
    flags = np.random.default_rng(count).random(count) < 0.5
    bits = to_bits(flags)
    assert bits == sum(1 << i for i, f in enumerate(flags.tolist()) if f)
    assert from_bits(bits, count).tolist() == flags.tolist()
    assert from_bits(bits | 1 << (count + 3), count).tolist() == flags.tolist()
    assert from_bits(-1, count).tolist() == [True] * count
