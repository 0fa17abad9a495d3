"""T089: tokens add up."""

from __future__ import annotations

import random

import pytest

from hicache_ray.testing import Served, Stack, full, state, window


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_t089_tokens_add_up(policy: str) -> None:
    rng = random.Random(89)
    stack = Stack(page=16, pools={"full": full(), "swa": window(20), "state": state(32)}, l1=40, l2=60, write_policy=policy)
    bases = [[1000 * i + j for j in range(rng.randint(1, 250))] for i in range(12)]
    total = dict.fromkeys(("device", "host", "storage", "computed"), 0)
    prompts = 0
    for n in range(1000):
        base = rng.choice(bases)
        tokens = base[: rng.randint(1, len(base))] + [50_000 + n] * rng.randint(0, 40)
        decoded = rng.randint(0, min(5, len(tokens) - 1))
        prompt = len(tokens) - decoded
        served = stack.put(tokens, decoded=decoded, limit=rng.choice([None, None, 64]))
        assert served.l1 + served.l2 + served.l3 + served.computed == prompt
        assert min(served.l1, served.l2, served.l3) >= 0
        assert served.computed >= 1
        for name, tokens_of in zip(total, (served.l1, served.l2, served.l3, served.computed), strict=True):
            total[name] += tokens_of
        prompts += prompt
        if n % 40 == 0:
            stack.flush(l1=True, l2=n % 80 == 0, timeout=10.0)
    assert stack.cache.tokens == total
    assert sum(total.values()) == prompts
    hits = total["device"] + total["host"] + total["storage"]
    assert 0 < hits / prompts <= 1
    assert min(total.values()) > 0
    stack.settle()
    stack.audit()


def test_t089_a_page_from_storage_counts_once() -> None:
    stack = Stack(page=64, pools={"full": full()})
    prompt = list(range(1, 514))
    stack.put(prompt)
    stack.settle()
    stack.flush()
    assert stack.put(prompt) == Served(0, 0, 512, 1)
    assert stack.put(prompt) == Served(512, 0, 0, 1)
    stack.flush(l1=True, l2=False, timeout=1.0)
    assert stack.put(prompt) == Served(0, 512, 0, 1)
    assert stack.cache.tokens == {"device": 512, "host": 512, "storage": 512, "computed": 516}
