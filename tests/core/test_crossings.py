"""Work that crosses other work: transfers side by side, copies that fail or are late, drafts from storage."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from hicache_ray.records import Move, Outcome, Span, slots_array
from hicache_ray.spec import Tier
from hicache_ray.storage.wrappers import StoreWrapper
from hicache_ray.store import KEY_BYTES, Bytes
from hicache_ray.testing import Stack, full, window
from tests.core.drive import at_rest, prompt

WAIT_S = 10.0
TOKENS = prompt(11, 25)


class Held(StoreWrapper):
    """A put that stops before it takes the bytes, until it is let go."""

    def __init__(self, inner: StoreWrapper) -> None:
        super().__init__(inner)
        self.begun, self.go = threading.Event(), threading.Event()

    def put(self, ids: Sequence[bytes], sources: Sequence[Bytes], timeout_s: float) -> int:
        self.begun.set()
        assert self.go.wait(WAIT_S)
        return self.inner.put(ids, sources, timeout_s)


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_head", "page_first_direct"])
def test_two_transfers_of_one_rank_do_not_share_their_staging(layout: str) -> None:
    stack = Stack(page=4, pools={"full": full()}, l1=8, l2=8, layout=layout)
    executor, none = stack._executors[0], slots_array()
    host = executor._rank.pools[Tier.HOST]["full"]
    for slot, value in ((0, 0xAA), (1, 0xBB)):
        for f in host.component.fields:
            host.rows(f.name)[slot].fill_(value)

    def named(key: int) -> bytes:
        return bytes([key]) * KEY_BYTES

    def move(source: Tier, target: Tier, slot: int, key: int) -> Outcome:
        slots = slots_array([slot])
        span = Span("full", none if source is Tier.STORAGE else slots, slots if source is Tier.STORAGE else none, (named(key),))
        return executor.execute(Move(1, "r", source, target, (span,), WAIT_S))

    assert move(Tier.HOST, Tier.STORAGE, 1, 2) == Outcome(bits=(1,))
    assert stack.store is not None
    executor.store = held = Held(stack.store)
    first = threading.Thread(target=move, args=(Tier.HOST, Tier.STORAGE, 0, 1))
    first.start()
    assert held.begun.wait(WAIT_S)
    read: list[Outcome] = []
    second = threading.Thread(target=lambda: read.append(move(Tier.STORAGE, Tier.HOST, 2, 2)))
    second.start()
    if layout == "page_first_direct":  # its pages are objects as they lie, so nobody waits
        second.join(WAIT_S)
        assert read == [Outcome(bits=(1,))]
    held.go.set()
    for thread in (first, second):
        thread.join(WAIT_S)
    assert read == [Outcome(bits=(1,))]
    assert move(Tier.STORAGE, Tier.HOST, 3, 1) == Outcome(bits=(1,))
    assert {int(b) for f in host.component.fields for b in host.rows(f.name)[3].unique()} == {0xAA}
    assert {int(b) for f in host.component.fields for b in host.rows(f.name)[2].unique()} == {0xBB}


def test_a_failed_load_does_not_stand_in_its_own_way() -> None:
    """The device holds one request. What the longer resume alone needed makes room for what is recomputed in its place."""
    tokens = TOKENS[:24]
    stack = Stack(page=4, pools={"full": full(), "swa": window(8)}, l1=6)
    stack.put(tokens)
    stack.settle()
    stack.drop("l1", "full", tokens, range(6))
    assert stack.have("l1", "swa", tokens) == set(range(6))
    stack.fail_copy("l2", "l1", "full", 0)
    began = stack.clock()
    served = stack.put(tokens)
    assert (served.l1, served.l2, served.computed) == (0, 0, 24)
    assert stack.clock() == began
    stack.settle()
    assert stack.read(tokens, "full") == stack.made(tokens, "full")
    at_rest(stack)


@pytest.mark.parametrize("tier", ["l2", "l3"])
def test_a_draft_that_is_shorter_than_its_target_comes_from_storage_as_well(tier: str) -> None:
    stack = Stack(page=4, pools={"full": full(), "draft": window(8, role="draft", lookahead=1)}, l1=16)
    stack.put(TOKENS)
    stack.settle()
    stack.flush(l1=True, l2=tier == "l3")
    for each in ("l2", "l3")[tier == "l3" :]:
        stack.drop(each, "draft", TOKENS, [5])
    served = stack.put(TOKENS, rid="again")
    assert served.computed == 1
    assert stack.draft("again", "draft") == 20
    stack.settle()
    at_rest(stack)
