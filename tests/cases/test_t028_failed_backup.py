"""T028: eviction with a failed backup: write_back, the host full and locked."""

from __future__ import annotations

import numpy as np

from hicache_ray.spec import Tier
from hicache_ray.testing import Stack, full
from tests.queues import WHERE, Queue, devices


@WHERE
def test_t028_eviction_with_a_failed_backup(layout: str, queue: Queue | None) -> None:
    stack = Stack(
        page=64, pools={"full": full()}, l2=4, write_policy="write_back", settings={"storage": False}, layout=layout, devices=devices(queue)
    )
    locked, prompt = list(range(1, 258)), list(range(1000, 1129))
    stack.put(locked)
    stack.evict_l1(64)
    stack.prefetch("lock", locked)
    assert stack.poll("lock").tokens == 256
    place = (Tier.HOST, "full")
    kept = np.flatnonzero(~stack.res.pools[place].pinned(np.arange(4))).astype(np.int32)
    lease = stack.res.leases.take("lock", place, kept)  # also the page that those who wait leave for what leaves the device
    stack.put(prompt)
    stack.settle()
    assert stack.have("l1", "full", prompt) == {0, 1}

    stack.evict_l1(64)
    assert stack.have("l1", "full", prompt) == set()  # dropped, and nobody says otherwise
    assert stack.have("l2", "full", prompt) == set()
    assert stack.have("l2", "full", locked) == {0, 1, 2, 3}
    assert stack.probe(prompt).reusable == 0
    assert stack.res.counters[(Tier.HOST, "full")].refused == 2
    stack.res.leases.release_all([lease])
    assert stack.load("lock") == 256
    assert stack.read(locked, "full") == stack.made(locked, "full")
    stack.audit()


@WHERE
def test_t028_a_copy_that_fails_is_not_on_the_host(layout: str, queue: Queue | None) -> None:
    more = {"settings": {"storage": False}, "layout": layout, "devices": devices(queue)}
    stack = Stack(page=64, pools={"full": full()}, write_policy="write_back", **more)  # type: ignore[arg-type]
    prompt = list(range(1, 258))
    stack.put(prompt)
    stack.fail_copy("l1", "l2", "full", 0)
    stack.evict_l1(64)
    assert stack.have("l1", "full", prompt) == set()
    assert len(stack.have("l2", "full", prompt)) == 3
    assert stack.res.counters[(Tier.HOST, "full")].failures == 1
    stack.put(prompt)
    assert stack.read(prompt, "full") == stack.made(prompt, "full")
    stack.audit()
