"""Loss of power: of what no sync has covered, any sector may be as it was before. What a put reported visible is there all the same."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from hicache_ray.storage import DiskStore
from tests.storage.disks import OpenDisk, PowerOs, get, put, small, visible
from tests.storage.objects import TIMEOUT_S, name


@pytest.mark.parametrize("fsync", ["batch", "always"])
def test_what_a_put_reported_survives_a_loss_of_power(memory: Path, disk: OpenDisk, fsync: str) -> None:
    chance = random.Random(7)
    (memory / "live").mkdir()
    port = PowerOs()
    moments: list[tuple[set[int], Path]] = []
    told: set[int] = set()

    def copy() -> None:
        into = memory / f"lost-{len(moments)}"
        into.mkdir()
        port.lose(memory / "live", into, chance)
        moments.append((set(told), into))

    class Moments(PowerOs):
        """Power may go between any two writes too."""

        def pwrite(self, descriptor: int, buffer: memoryview, offset: int) -> int:
            written = super().pwrite(descriptor, buffer, offset)
            if chance.random() < 0.1:
                copy()
            return written

    port = Moments()
    config: dict[str, Any] = {"fsync": fsync, "direct": "off"}
    store = disk(small(memory / "live", **config), os_port=port)
    for i in range(60):
        numbers = [3 * n for n in range(i, i + 3)] if i < 40 else list(range(5 * i, 5 * i + 3))
        held = set(visible(store))
        told = held - set(_may_go(store))
        put(store, numbers)
        told = set(visible(store))
        if i % 5 == 4:
            copy()
        if i % 10 == 9:
            told -= {visible(store)[0]}
            store.drop([name(visible(store)[0])], TIMEOUT_S)
    store.close()

    assert len(moments) > 20
    for kept, path in moments:
        lost = DiskStore(small(path, **config))
        try:
            there = visible(lost)
            served = get(lost, there)  # compares: nothing wrong is served
            assert served >= kept, "what a put reported visible is lost"
            if fsync == "always":
                assert served == set(there), "something torn is visible"
            lost.check()
        finally:
            lost.close()


def _may_go(store: DiskStore) -> list[int]:
    """What the next put may evict: all but what is sure to stay is more than enough here, so the least recently used dozen."""
    listings = [segment.listing() for segment in store._index.segments()]
    uses = [
        (int(use), int.from_bytes(bytes(row["id"][:48]), "big")) for at in listings for use, row in zip(at.used, at.records, strict=True)
    ]
    return [number for _, number in sorted(uses)[:24]]
