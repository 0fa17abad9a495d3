"""T005: a sidecar shorter than the KV: pages vanish between the lookup and the read."""

from __future__ import annotations

import pytest

from hicache_ray.spec import Tier
from hicache_ray.testing import Stack, full


@pytest.mark.parametrize("ranks", [1, 2])
def test_t005_sidecar_shorter_than_kv(ranks: int) -> None:
    stack = Stack(page=64, pools={"full": full(), "idx": full()}, ranks=ranks)
    prompt = list(range(1, 514))
    stack.put(prompt)
    stack.settle()
    stack.flush()
    assert stack.store is not None
    stack.store.fault("get", "gone", 2 * ranks, only=(5, 6, 7))  # each rank reads full, then idx
    stack.prefetch("r", prompt)
    stack.settle()
    assert stack.poll("r").tokens == 320
    for pool in ("full", "idx"):
        assert stack.have("l2", pool, prompt) == {0, 1, 2, 3, 4}
        slots = stack.res.pools[(Tier.HOST, pool)]
        assert (slots.free, slots.cached, slots.held) == (59, 5, 0)
        assert slots.free + slots.idle + len(stack.res.leases.open("r")[0].slots) == 64
    stack.audit()
    found = stack.probe(prompt)
    assert (found.l2, found.l3, found.reusable) == (320, 320, 320)
    assert stack.load("r") == 320
    assert stack.read(prompt, "idx") == stack.made(prompt, "idx")
