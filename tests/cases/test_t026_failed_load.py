"""T026: a failed load is not a load."""

from __future__ import annotations

import pytest

from hicache_ray.spec import Tier
from hicache_ray.testing import Served, Stack, full
from tests.queues import WHERE, Queue, devices


def ready(ranks: int, layout: str, queue: Queue | None) -> tuple[Stack, list[int]]:
    """8 pages on the host only, and the copy of page 3 will fail."""
    stack = Stack(page=64, pools={"full": full()}, ranks=ranks, layout=layout, devices=devices(queue, ranks))
    prompt = list(range(1, 514))
    stack.put(prompt)
    stack.settle()
    stack.flush(l1=True, l2=False)
    stack.fail_copy("l2", "l1", "full", 3)
    return stack, prompt


@WHERE
@pytest.mark.parametrize("ranks", [1, 2])
def test_t026_a_failed_load_is_not_a_load(ranks: int, layout: str, queue: Queue | None) -> None:
    stack, prompt = ready(ranks, layout, queue)
    stack.prefetch("r", prompt)
    assert stack.load("r") == 192
    assert stack.res.counters[(Tier.DEVICE, "full")].failures == 1
    assert 3 not in stack.have("l1", "full", prompt)
    assert stack.have("l2", "full", prompt) == set(range(8))
    assert stack.probe(prompt).l1 == 192
    for rank in range(ranks):
        assert stack.read(prompt, "full", rank) == stack.made(prompt, "full", rank)
    stack.audit()


@WHERE
def test_t026_the_request_computes_the_rest(layout: str, queue: Queue | None) -> None:
    stack, prompt = ready(2, layout, queue)
    assert stack.put(prompt) == Served(0, 192, 0, 321)
    for rank in range(2):
        assert stack.read(prompt, "full", rank) == stack.made(prompt, "full", rank)
    stack.settle()
    stack.audit()
