"""Storage fails at the 1st, 2nd, ... n-th call of a life of requests, until the life passes untouched: no request hangs or fails."""

from __future__ import annotations

from contextlib import suppress

import pytest

from hicache_ray.errors import HiCacheError
from hicache_ray.storage.faults import FAULTS, FaultyStore
from hicache_ray.storage.memory import MemoryStore
from hicache_ray.testing import FakeClock, Served, Stack, full, state, window

PAGE, SLOTS = 8, 24
HYBRID = {"full": full(layers=1), "swa": window(20, layers=1), "state": state(2 * PAGE, layers=1)}
A, B = (list(range(first, first + 4 * PAGE + 1)) for first in (100, 200))
NEW = list(range(300, 300 + 4 * PAGE + 1))
#: What a life calls, and so what can fail in it.
CALLED = ("put", "get", "lookup", "clear")
#: Under write_back the same kinds again would show the same.
KINDS = {"write_through": ("error", "hang", "delay", "lost", "torn", "flip", "gone"), "write_back": ("error", "lost", "gone")}


def life(stack: Stack) -> None:
    """Store, forget, fetch, fork, evict, flush. A failing store costs hits; nothing else."""
    served(stack, A)
    forget(stack)
    served(stack, A + B[:PAGE])
    stack.evict_l1(2)
    served(stack, B)
    forget(stack)
    stack.prefetch("p", B)
    stack.settle()
    served(stack, B)
    with suppress(HiCacheError):  # a flush of storage that failed says so
        stack.flush(l3=True)
    stack.audit()
    served(stack, A)
    stack.settle()
    stack.audit()


def forget(stack: Stack) -> None:
    """What is on the device goes down (under write_back only when it is evicted), then device and host forget it."""
    stack.settle()
    stack.evict_l1(SLOTS)
    stack.settle()
    stack.flush(l1=True, l2=True)


def served(stack: Stack, prompt: list[int]) -> None:
    """The engine has compared every byte that it read (else this raises), and every token is accounted for."""
    report = stack.put(prompt)
    assert report.l1 + report.l2 + report.l3 + report.computed == len(prompt)


@pytest.mark.parametrize("policy", KINDS)
@pytest.mark.parametrize("op", CALLED)
def test_nth_failure(op: str, policy: str) -> None:
    for kind in set(KINDS[policy]).intersection(FAULTS[op]):
        nth, untouched = 0, False
        while not untouched:
            nth += 1
            clock = FakeClock()
            memory = MemoryStore(1 << 20)
            store = FaultyStore(memory, clock.advance)
            stack = Stack(page=PAGE, pools=HYBRID, l1=SLOTS, l2=SLOTS, write_policy=policy, store=store, clock=clock)
            store.fault(op, kind, nth)
            life(stack)
            untouched = bool(store.planned())
            memory.check()
            assert memory.stats(1.0).leases == 0
            heals(stack, store)
        assert nth > 1


def heals(stack: Stack, store: FaultyStore) -> None:
    store.heal()
    stack.put(NEW)
    forget(stack)
    assert stack.probe(NEW).l3 == 4 * PAGE
    assert stack.put(NEW) == Served(0, 0, 4 * PAGE, 1)
    stack.settle()
    stack.audit()
