"""T083: objects and calls. One object per page whatever the number of layers; calls by the batch."""

from __future__ import annotations

import pytest

from hicache_ray.executor import Rank
from hicache_ray.keys import as_tokens, page_keys
from hicache_ray.spec import Field
from hicache_ray.storage.faults import FaultyStore
from hicache_ray.storage.memory import MemoryStore
from hicache_ray.storage.wrappers import CountingStore
from hicache_ray.testing import Served, Stack, full

PAGES, LAYERS, PAGE = 1000, 60, 4
PROMPT = list(range(1, PAGES * PAGE + 2))


@pytest.mark.parametrize("layout", ["page_first_direct", "layer_first"])
def test_t083_objects_and_calls(layout: str) -> None:
    pools = {"full": full(layers=LAYERS, fields=(Field("k", 1, 1), Field("v", 1, 1)))}
    counting = CountingStore(MemoryStore(1 << 26))
    stack = Stack(page=PAGE, pools=pools, l1=1010, l2=1040, store=FaultyStore(counting), layout=layout)
    assert stack.put(PROMPT) == Served(0, 0, 0, len(PROMPT))
    stack.settle()
    keys = page_keys(stack.ns, as_tokens(PROMPT))
    ids = list(counting.scan())
    assert len(ids) == PAGES
    assert sorted(i[: len(keys[0])] for i in ids) == sorted(keys)
    assert len(ids) * pools["full"].page_bytes(PAGE) == counting.stats(1.0).used_bytes
    assert counting.calls["put"] == 8  # 7 of 128 objects and one of 104
    assert counting.calls["lookup"] <= 8
    stack.flush()
    before = dict(counting.calls)
    assert stack.put(PROMPT) == Served(0, 0, PAGES * PAGE, 1)
    assert counting.calls["get"] - before.get("get", 0) == 8
    assert counting.calls["lookup"] - before["lookup"] <= 8
    assert stack.read(PROMPT, "full") == stack.made(PROMPT, "full")
    stack.settle()
    assert counting.calls["put"] == 8
    stack.audit()


def test_t083_the_batch_is_a_setting() -> None:
    counting = CountingStore(MemoryStore(1 << 20))
    stack = Stack(page=PAGE, store=FaultyStore(counting))
    stack._executors[0]._rank = Rank(**{**stack._executors[0]._rank.__dict__, "batch": 3})
    stack.put(range(1, 42))
    stack.settle()
    assert counting.calls["put"] == 4  # of 10 pages
