"""T020: a backup waits for the writer of the pages it reads."""

from __future__ import annotations

import itertools

import pytest

from hicache_ray.copies_queues import Queue
from hicache_ray.layout import ORDERS
from hicache_ray.records import Compute, Outcome
from hicache_ray.spec import Tier
from tests.queues import Rig, slow, without_fences

ROUNDS = 200


def rounds(rig: Rig) -> int:
    """The engine's write takes 50 ms, the backup is called right after it was enqueued; how many pages of L2 are wrong."""
    mismatches = 0
    for i in range(ROUNDS):
        slot, host = i % 2, 2 + i % 3

        def engine(record: Compute, slot: int = slot, pattern: int = i) -> Outcome:
            rig.enqueue_fill(slot, pattern)
            return Outcome()

        rig.engine = engine
        rig.compute(slot)
        rig.backup(slot, host)
        assert rig.device.joins == []  # nobody has waited for a device, on whatever thread
        rig.device.settle()
        mismatches += not rig.is_filled(Tier.HOST, host, i)
    assert rig.device.now >= ROUNDS * 0.05
    return mismatches


@pytest.mark.parametrize(("device_layout", "host_layout"), list(itertools.product(ORDERS, ORDERS)))
def test_t020_backup_waits_for_the_writer(device_layout: str, host_layout: str) -> None:
    assert rounds(Rig(slow(Queue.COMPUTE), layouts=(device_layout, host_layout))) == 0


def test_t020_without_the_fence_every_page_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    without_fences(monkeypatch)
    assert rounds(Rig(slow(Queue.COMPUTE))) == ROUNDS
