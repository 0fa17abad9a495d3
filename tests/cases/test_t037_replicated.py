"""T037: replicated KV is stored once."""

from __future__ import annotations

from hicache_ray.spec import Field
from hicache_ray.testing import Stack, full

LATENT = {"latent": full(shard="replicated", fields=(Field("c", 1, 36),))}


def test_t037_replicated_kv_is_stored_once() -> None:
    stack = Stack(page=64, pools=LATENT, ranks=8)
    prompt = list(range(1, 642))
    stack.put(prompt)
    stack.settle()
    assert stack.store is not None
    objects = list(stack.store.scan())
    assert len(objects) == len(set(objects)) == 10
    for rank in range(8):
        assert stack.have("l3", "latent", prompt, rank) == set(range(10))
    # More than one rank has written: each page by one of them.
    stack.flush()
    assert stack.put(prompt).l3 == 640
    for rank in range(8):
        assert stack.read(prompt, "latent", rank) == stack.made(prompt, "latent", rank)
    stack.settle()
    stack.audit()

    # The ranks are gone, with whatever each had written; the store has all ten. Any group of any size can read them.
    for ranks in (8, 2):
        other = Stack(page=64, pools=LATENT, ranks=ranks, store=stack.store)
        assert other.probe(prompt).l3 == 640
        assert other.put(prompt).l3 == 640
        assert all(other.read(prompt, "latent", rank) == stack.made(prompt, "latent") for rank in range(ranks))
        other.settle()
    assert len(list(stack.store.scan())) == 10
