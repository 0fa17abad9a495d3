"""T015: where a hole in the window matters."""

from __future__ import annotations

import pytest

from hicache_ray.testing import Stack, full, window


@pytest.mark.parametrize(
    ("present", "reusable"),
    [({0, 2, 3, 4, 5}, 384), ({0, 1, 2, 3, 5}, 256), ({4, 5}, 384), ({5}, 0)],
    ids=["all but 1", "all but 4", "4 and 5", "5"],
)
@pytest.mark.parametrize("ranks", [1, 4])
def test_t015_where_a_tombstone_matters(present: set[int], reusable: int, ranks: int) -> None:
    stack = Stack(page=64, pools={"full": full(), "swa": window(128)}, ranks=ranks)
    prompt = list(range(1, 1001))
    stack.put(prompt[:384])
    stack.settle()
    assert stack.probe(prompt).reusable == 384
    for tier in ("l1", "l2", "l3"):
        assert stack.have(tier, "full", prompt) == {0, 1, 2, 3, 4, 5}
        stack.drop(tier, "swa", prompt, {0, 1, 2, 3, 4, 5} - present)
        assert stack.have(tier, "swa", prompt) == present
    found = stack.probe(prompt)
    assert (found.l1, found.l2, found.l3, found.reusable) == (reusable,) * 4
    served = stack.put(prompt)
    assert (served.l1, served.computed) == (reusable, 1000 - reusable)
    stack.settle()
    assert stack.probe(prompt).reusable == 960
    for rank in range(ranks):
        assert stack.read(prompt, "swa", rank) == stack.made(prompt, "swa", rank)
    stack.audit()
