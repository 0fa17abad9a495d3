"""T014: the round trip of states is bit exact, in any order of put, backup, evict and load."""

from __future__ import annotations

import random

import pytest

from hicache_ray.testing import Stack, full, state
from tests.queues import WHERE, Queue, devices


@WHERE
@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_t014_round_trip_is_bit_exact(policy: str, layout: str, queue: Queue | None) -> None:
    prompts = [[1000 * i + j for j in range(1, 66)] for i in range(8)]
    # 8 snapshots fill the device; a request takes two slots more: its live state, and the snapshot that it resumes from.
    stack = Stack(
        page=64, pools={"full": full(), "state": state(64)}, l1=10, l2=9, write_policy=policy, layout=layout, devices=devices(queue)
    )
    rng = random.Random(14)
    came_from = {"l1": 0, "l2": 0, "l3": 0}
    for _ in range(50):
        for i in rng.sample(range(8), 8):
            act = rng.randrange(5)
            if act == 0:
                stack.evict("l1", {"state": rng.randint(0, 10), "full": rng.randint(0, 10)})
            elif act == 1:
                stack.evict("l2", {"state": rng.randint(0, 9), "full": rng.randint(0, 9)})
            elif act == 2 and rng.random() < 0.2:
                stack.flush()
            served = stack.put(prompts[i])
            for tier in came_from:
                came_from[tier] += getattr(served, tier)
            assert stack.read(prompts[i], "state") == stack.made(prompts[i], "state") != b""
            assert stack.read(prompts[i], "full") == stack.made(prompts[i], "full") != b""
            if rng.random() < 0.7:
                stack.settle()
        stack.settle()
        stack.audit()
    assert min(came_from.values()) > 0
    for prompt in prompts:
        assert stack.probe(prompt).reusable == 64
        stack.put(prompt)
        assert stack.read(prompt, "state") == stack.made(prompt, "state")
