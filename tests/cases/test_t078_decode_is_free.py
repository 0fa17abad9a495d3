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
    first = steps.until(lambda e: isinstance(e.record, Compute) and e.record.start >= 130)
    decode = [first, steps.queue.pop(0)]
    asked, executed = counting.total(), stack.calls
    for rank, envelope in enumerate(decode):
        assert isinstance(envelope.record, Compute)
        assert (envelope.rank, envelope.record.start, envelope.record.steps, envelope.record.end) == (rank, 130, 100, 230)
    assert (steps.queue, stack.pending(), stack.group.next_deadline()) == ([], [], None)
    outcomes = [stack.execute(envelope) for envelope in decode]
    assert (stack.pending(), stack.group.next_deadline()) == ([], None)
    assert stack.calls == executed + 2  # one per rank, for 100 steps
    assert counting.total() == asked > 0
    for envelope, outcome in zip(decode, outcomes, strict=True):
        stack.report(envelope, outcome)
    stack.settle()  # and now the page of the prompt is backed up
    assert stack.outputs["r"][:100] == prompt[130:]
    assert stack.have("l3", "full", prompt) == {0}
    stack.audit()
