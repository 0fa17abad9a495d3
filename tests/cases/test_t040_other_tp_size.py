"""T040: head shards across TP sizes. What does not fit exactly is a miss that names the field; never the wrong slice of heads."""

from __future__ import annotations

import pytest

from hicache_ray.spec import Component, Field
from hicache_ray.storage.faults import FaultyStore
from hicache_ray.storage.memory import MemoryStore
from hicache_ray.testing import Served, Stack, full, window

PROMPT = list(range(1, 642))
HEADS = 4


def group(ranks: int, store: FaultyStore, heads: int | None = None) -> Stack:
    """Of a model with 4 heads, of which each rank has its part."""
    mine = heads or HEADS // ranks

    def kv(of: object) -> Component:
        return of(fields=(Field("k", mine, 4), Field("v", mine, 4)))  # type: ignore[operator,no-any-return]

    return Stack(page=64, pools={"full": kv(full), "swa": kv(lambda **m: window(100, **m))}, ranks=ranks, store=store, exact=True, grid=64)


@pytest.mark.parametrize(("writers", "readers"), [(2, 4), (4, 2), (1, 4), (4, 1)])
def test_t040_another_tp_size_is_a_miss_that_names_the_field(writers: int, readers: int) -> None:
    store = FaultyStore(MemoryStore(1 << 24))
    one = group(writers, store)
    one.put(PROMPT)
    one.settle()
    written = {i: bytes_of(store, i) for i in store.scan()}
    other = group(readers, store)
    found = other.probe(PROMPT)
    assert (found.l1, found.l2, found.l3) == (0, 0, 0)
    assert set(found.differs) == {"fields", "shard"}
    assert other.put(PROMPT) == Served(0, 0, 0, 641)
    other.settle()
    for rank in range(readers):
        assert other.read(PROMPT, "full", rank) == other.made(PROMPT, "full", rank) != b""
    # Both live side by side in the store, and each reads its own.
    assert {i: bytes_of(store, i) for i in written} == written
    assert len(list(store.scan())) == len(written) // writers * (writers + readers)
    for stack in (one, other):
        stack.flush()
        assert stack.put(PROMPT) == Served(0, 0, 640, 1)
        for rank in range(stack.ranks):
            assert stack.read(PROMPT, "full", rank) == stack.made(PROMPT, "full", rank)
        stack.settle()
        stack.audit()


def test_t040_shards_of_equal_size_of_another_tp_size_are_told_apart() -> None:
    """Objects as long as one's own, of other heads: the number of ranks is part of the name."""
    store = FaultyStore(MemoryStore(1 << 24))
    one = group(2, store, heads=1)
    one.put(PROMPT)
    one.settle()
    other = group(4, store, heads=1)
    found = other.probe(PROMPT)
    assert found.l3 == 0
    assert found.differs == ("shard",)
    assert other.put(PROMPT) == Served(0, 0, 0, 641)
    other.settle()
    other.audit()


def bytes_of(store: FaultyStore, id: bytes) -> bytes:
    with store.lease([id], 1.0) as lent:
        (view,) = lent.views
        assert view is not None
        return bytes(view)
