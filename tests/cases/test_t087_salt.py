"""T087: the paired salt test. Both parts must hold."""

from __future__ import annotations

import pytest

from hicache_ray.actors.setup import tenant_namespaces
from hicache_ray.config_sources import load
from hicache_ray.testing import Served, Stack, full, state

PROMPT = list(range(1, 514))


@pytest.mark.parametrize("flushed", [(), ("l1",), ("l1", "l2")])
def test_t087_paired_salt(flushed: tuple[str, ...]) -> None:
    stack = Stack(page=64, pools={"full": full(), "state": state(128)}, ranks=2, namespace={"salt": "a"})
    stack.put(PROMPT)
    stack.settle()
    if flushed:
        stack.flush(l1="l1" in flushed, l2="l2" in flushed)

    b = {"salt": "b"}
    found = stack.probe(PROMPT, namespace=b)
    assert (found.l1, found.l2, found.l3, found.reusable) == (0, 0, 0, 0)
    assert found.differs == ("salt",)
    assert stack.put(PROMPT, namespace=b) == Served(0, 0, 0, 513)

    c = {"salt": "a"}
    assert stack.probe(PROMPT, namespace=c).reusable == 512
    expected = {(): Served(512, 0, 0, 1), ("l1",): Served(0, 512, 0, 1), ("l1", "l2"): Served(0, 0, 512, 1)}[flushed]
    assert stack.put(PROMPT, namespace=c) == expected
    stack.settle()
    stack.audit()
    assert stack.store is not None
    readable = [value for record in stack.store.described(1.0).values() for value in record.values()]
    assert "a" not in readable
    assert "b" not in readable


def test_t087_tenants_of_a_deployment() -> None:
    """Their namespaces as the deployment makes them; equal salts by mistake do not bring two of them together."""
    flags = {"tenants.a.salt": "one secret", "tenants.b.salt": "one secret", "tenants.c.salt": "another one", "cache.page_size": 64}
    config = load(flags=flags).config
    stack = Stack(page=64, pools={"full": full(), "state": state(128)}, ranks=2)
    mine = {name: {"tenant": ns.tenant, "salt": ns.salt} for name, ns in tenant_namespaces(config, stack.ns).items()}
    for name in mine:
        assert stack.put(PROMPT, namespace=mine[name]) == Served(0, 0, 0, 513)
        assert stack.put(PROMPT, namespace=mine[name]) == Served(512, 0, 0, 1)
        stack.settle()
    assert stack.cache.tenants == {name: {"device": 512, "host": 0, "storage": 0, "computed": 514} for name in mine}
    assert stack.put(PROMPT) == Served(0, 0, 0, 513)
    gone = stack.drop_space(**mine["a"])
    assert gone.storage == 2 * (8 + 4)
    assert stack.probe(PROMPT, namespace=mine["a"]).reusable == 0
    assert stack.probe(PROMPT, namespace=mine["b"]).l3 == 512
    assert stack.put(PROMPT, namespace=mine["b"]) == Served(512, 0, 0, 1)
    stack.settle()
    stack.audit()
