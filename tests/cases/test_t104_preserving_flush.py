"""T104: a flush that first writes down what only L1 has; after a restart L3 gives as much as there was."""

from __future__ import annotations

import pytest

from hicache_ray.testing import Stack, full, state, window
from tests.core.drive import all_bytes_are_right, at_rest, prompt

ROOT = prompt(1, 256)
PATHS = [ROOT + prompt(seed, 100 + 64 * seed) for seed in range(2, 6)]


@pytest.mark.parametrize("policy", ["write_back", "write_through_selective", "write_through"])
@pytest.mark.parametrize("l2", [64, 7])
def test_t104_preserving_flush(policy: str, l2: int) -> None:
    pools = {"full": full(), "swa": window(100), "state": state(128)}
    stack = Stack(page=64, pools=pools, write_policy=policy, ranks=2, l2=l2)
    for tokens in PATHS:
        stack.put(tokens)
        stack.put(tokens)  # a hot root
        stack.settle()
    before = [stack.probe([*t, 0]).reusable for t in PATHS]
    assert before == [len(t) // 128 * 128 for t in PATHS]
    stack.flush(preserve=True)
    assert all(pool.cached == 0 for pool in stack.res.pools.values())
    assert [stack.probe([*t, 0]).l3 for t in PATHS] == before
    at_rest(stack)

    again = Stack(page=64, pools=pools, write_policy=policy, ranks=2, l2=64, store=stack.store)
    for tokens, k in zip(PATHS, before, strict=True):
        assert again.have("l3", "full", tokens) == set(range(len(tokens) // 64))
        served = again.put([*tokens, 0])
        assert served.l1 + served.l2 + served.l3 == k
        again.settle()
    all_bytes_are_right(again, [[*t, 0] for t in PATHS])


def test_t104_without_it_what_only_l1_has_is_gone() -> None:
    stack = Stack(page=64, write_policy="write_back")
    stack.put(PATHS[0])
    stack.settle()
    stack.flush()
    assert stack.probe(PATHS[0]).reusable == 0
