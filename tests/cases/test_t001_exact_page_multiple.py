"""T001: a prompt of an exact page multiple, with a sliding window, from L3 only."""

from __future__ import annotations

import pytest

from hicache_ray.testing import Stack, full, window


@pytest.mark.parametrize(("tokens", "reusable", "window_page"), [(256, 192, 2), (257, 256, 3)])
def test_t001_exact_page_multiple(tokens: int, reusable: int, window_page: int) -> None:
    stack = Stack(page=64, pools={"full": full(), "swa": window(64)})
    prompt = list(range(1, tokens + 1))
    stack.put(prompt)
    stack.settle()
    assert stack.have("l3", "full", prompt) == stack.have("l3", "swa", prompt) == {0, 1, 2, 3}
    stack.flush(l1=True, l2=True)
    assert stack.probe(prompt).l2 == 0

    stack.prefetch("r", prompt)
    stack.settle()
    assert (stack.poll("r").state, stack.poll("r").tokens) == ("ready", reusable)
    found = stack.probe(prompt)
    assert (found.l2, found.l3, found.reusable) == (reusable, reusable, reusable)
    assert stack.have("l2", "swa", prompt) == {window_page}

    assert stack.load("r") == reusable
    assert stack.read(prompt, "full") == stack.made(prompt, "full")
    assert stack.read(prompt, "swa") == stack.made(prompt, "swa")
    page = stack.spec["full"].page_bytes(64)
    assert (len(stack.read(prompt, "full")), len(stack.read(prompt, "swa"))) == (reusable // 64 * page, page)
    stack.settle()
    stack.audit()
