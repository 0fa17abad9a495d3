"""T022: a host page in flight is not a victim."""

from __future__ import annotations

import numpy as np

from hicache_ray.group import Envelope
from hicache_ray.spec import Tier
from hicache_ray.testing import Stack, full
from tests.queues import WHERE, Queue, devices

PAIR = list(range(1, 130))  # pages A and B
REST = list(range(1000, 1129))
NEW = list(range(2000, 2129))


def loading(envelope: Envelope) -> bool:
    return getattr(envelope.record, "source", None) is Tier.HOST and getattr(envelope.record, "target", None) is Tier.DEVICE


def ready(layout: str, queue: Queue | None) -> tuple[Stack, list[Envelope]]:
    """L2 is full, a load that reads A and B is in flight, and a finished request waits for its backup of two pages."""
    stack = Stack(page=64, pools={"full": full()}, l2=4, layout=layout, devices=devices(queue))
    for prompt in (PAIR, REST):
        stack.put(prompt)
        stack.settle()
    stack.evict_l1(64)
    assert stack.have("l2", "full", PAIR) == stack.have("l2", "full", REST) == {0, 1}
    assert stack.res.pools[(Tier.HOST, "full")].free == 0
    stack.begin(NEW, "new")
    stack.step()  # its lookup is answered and it has the device
    stack.begin(PAIR, "pair")
    loads: list[Envelope] = []
    while not loads:
        for envelope in stack.pending():
            if loading(envelope):
                loads.append(envelope)
            else:
                stack.run(envelope)
    return stack, loads


@WHERE
def test_t022_victims_are_the_others(layout: str, queue: Queue | None) -> None:
    stack, loads = ready(layout, queue)
    stack.settle()  # the backup of the new pages completes while the load is still under way
    assert stack.have("l2", "full", PAIR) == {0, 1}
    assert stack.have("l2", "full", REST) == set()
    assert stack.have("l2", "full", NEW) == {0, 1}
    stack.run(loads[0])
    stack.settle()
    assert stack.served["pair"].l2 == 128
    assert stack.read(PAIR, "full") == stack.made(PAIR, "full")
    stack.audit()


@WHERE
def test_t022_refused_where_nothing_is_free(layout: str, queue: Queue | None) -> None:
    """The other two pages are held as well: the backup is refused, the load is right."""
    stack = Stack(page=64, pools={"full": full()}, l2=4, layout=layout, devices=devices(queue))
    for prompt in (PAIR, REST):
        stack.put(prompt)
        stack.settle()
    stack.evict_l1(64)
    stack.prefetch("pair", PAIR)
    place = (Tier.HOST, "full")
    held = np.flatnonzero(~stack.res.pools[place].pinned(np.arange(4))).astype(np.int32)
    lease = stack.res.leases.take("holds the rest", place, held)
    stack.settle()
    refused = stack.res.counters[(Tier.HOST, "full")].refused
    stack.put(NEW)
    stack.settle()
    assert stack.res.counters[(Tier.HOST, "full")].refused == refused + 2
    assert stack.have("l2", "full", NEW) == set()
    assert stack.have("l2", "full", PAIR) == stack.have("l2", "full", REST) == {0, 1}
    assert stack.load("pair") == 128
    assert stack.read(PAIR, "full") == stack.made(PAIR, "full")
    stack.res.leases.release_all([lease])
    stack.settle()
    stack.audit()
