"""T078: an idle tier costs nothing in decode."""

from __future__ import annotations

from hicache_ray.records import Compute
from hicache_ray.storage import CountingStore, FaultyStore
from hicache_ray.storage.memory import MemoryStore
from hicache_ray.testing import Stack, full, state
from tests.core.drive import Steps


def test_t078_no_calls_while_no_page_completes() -> None:
    """100 decode steps over a page of 128 tokens: the ranks run them as one record, nothing is asked of them or of L3 meanwhile."""
    counting = CountingStore(MemoryStore(1 << 30))
    stack = Stack(page=128, pools={"full": full(), "state": state(128)}, ranks=2, store=FaultyStore(counting))
    prompt = list(range(1, 131 + 100))
    stack.begin(prompt, "r", decoded=100)  # 130 tokens are given; cached lengths 130 to 229 complete no page
    steps = Steps(stack)
    steps.until(lambda e: isinstance(e.record, Compute) and e.record.start >= 130)
    before, executed = counting.total(), stack.calls
    decode = steps.queue.pop(0)
    assert isinstance(decode.record, Compute)
    assert (decode.record.start, decode.record.steps, decode.record.end) == (130, 100, 230)
    assert not steps.queue
    assert not stack.pending()
    assert (counting.total(), stack.calls) == (before, executed)
    assert stack.group.next_deadline() is None
