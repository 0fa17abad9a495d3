"""T087: the paired salt test. Both parts must hold."""

from __future__ import annotations

import pytest

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
