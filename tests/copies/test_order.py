"""The order of engine and copies on a device with queues: each fence, and that without it the test would fail."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from threading import Event, Thread

import numpy as np
import pytest

from hicache_ray import copies_queues
from hicache_ray.copies_fake import FakeDevice
from hicache_ray.copies_queues import Leg, Order, Queue, Timeline, layer_steps
from hicache_ray.errors import GroupLost, HiCacheError
from hicache_ray.records import Compute, Digest, Outcome, slots_array
from hicache_ray.spec import Tier
from hicache_ray.store import KEY_BYTES
from hicache_ray.testing import full, state
from tests.queues import PAGE, SLOTS, Rig, slow, without_fences

FENCED = pytest.mark.parametrize("fenced", [True, False], ids=["fenced", "without fences"])


@pytest.fixture(autouse=True)
def fences(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not getattr(request.node, "callspec", None) or request.node.callspec.params.get("fenced", True):
        return
    without_fences(monkeypatch)


def reading(rig: Rig, seen: list[bool], pattern: int, slot: int) -> None:
    """The engine's record looks, late, whether the slot still holds what it held when the record began."""

    def engine(record: Compute) -> Outcome:
        rig.device.enqueue(Queue.COMPUTE, lambda: seen.append(rig.is_filled(Tier.DEVICE, slot, pattern)), "read")
        return Outcome()

    rig.engine = engine


@FENCED
def test_a_load_does_not_overwrite_what_a_running_forward_reads(fenced: bool) -> None:
    rig, seen = Rig(slow(Queue.COMPUTE)), []
    for i in range(50):
        rig.fill(Tier.DEVICE, 0, 2 * i)
        rig.fill(Tier.HOST, 1, 2 * i + 1)
        reading(rig, seen, 2 * i, 0)
        rig.compute(0, 1, start=PAGE)
        rig.load(1, 0)
        rig.device.settle()
        assert rig.is_filled(Tier.DEVICE, 0, 2 * i + 1)
    assert seen == [fenced] * 50
    assert rig.device.joins == []


@FENCED
def test_a_load_lands_after_the_last_writer_of_its_slot(fenced: bool) -> None:
    rig = Rig(slow(Queue.COMPUTE))

    def engine(record: Compute) -> Outcome:
        rig.enqueue_fill(0, 7)
        return Outcome()

    rig.engine = engine
    rig.fill(Tier.HOST, 1, 8)
    rig.compute(0)
    rig.load(1, 0)
    rig.device.settle()
    assert rig.is_filled(Tier.DEVICE, 0, 8) is fenced


@FENCED
def test_a_forward_writes_after_the_backup_of_what_was_there(fenced: bool) -> None:
    rig = Rig(slow(Queue.COPY))

    def engine(record: Compute) -> Outcome:
        rig.enqueue_fill(0, 2)
        return Outcome()

    rig.engine = engine
    rig.fill(Tier.DEVICE, 0, 1)
    rig.backup(0, 3)
    rig.compute(0)
    rig.device.settle()
    assert rig.is_filled(Tier.HOST, 3, 1) is fenced
    assert rig.is_filled(Tier.DEVICE, 0, 2)


@FENCED
def test_a_forward_writes_after_a_load_that_nobody_wants_any_more(fenced: bool) -> None:
    """The load's request was cancelled, its slot given to another."""
    rig = Rig(slow(Queue.COPY))

    def engine(record: Compute) -> Outcome:
        rig.enqueue_fill(0, 2)
        return Outcome()

    rig.engine = engine
    rig.fill(Tier.HOST, 3, 1)
    rig.load(3, 0)
    rig.compute(0)
    rig.device.settle()
    assert rig.is_filled(Tier.DEVICE, 0, 2) is fenced


def by_layer(rig: Rig, pattern: int, good: list[bool]) -> None:
    """An engine that reads layer after layer, and waits for each."""
    wait_layer = rig.mover.by_layer()
    assert wait_layer is not None

    def engine(record: Compute) -> Outcome:
        for layer in range(rig.layers):
            wait_layer(rig.name, layer)
            look = partial(lambda n: good.append(rig.is_filled(Tier.DEVICE, 0, pattern, n)), layer)
            rig.device.enqueue(Queue.COMPUTE, look, f"read {layer}")
        return Outcome()

    rig.engine = engine


@FENCED
def test_a_layer_computes_as_soon_as_it_is_in(fenced: bool) -> None:
    rig, good = Rig(slow(Queue.COPY)), []
    by_layer(rig, 5, good)
    rig.fill(Tier.HOST, 2, 5)
    rig.load(2, 0)
    rig.compute(0, 1, start=PAGE)
    rig.device.settle()
    assert good == [fenced] * 4
    if fenced:
        name = rig.name
        assert rig.labels() == [label for n in range(4) for label in (f"load {name} {n}", f"read {n}")]
        ends = {done.label: done for done in rig.device.log}
        assert ends["read 0"].end < ends[f"load {name} 3"].end  # layer 0 computes while layer 3 still copies
        assert rig.device.joins == []


def test_an_engine_that_does_not_wait_by_layers_waits_for_the_whole_load() -> None:
    rig, seen = Rig(slow(Queue.COPY)), []
    rig.fill(Tier.HOST, 2, 5)
    reading(rig, seen, 5, 0)
    rig.load(2, 0)
    rig.compute(0, 1, start=PAGE)
    rig.device.settle()
    assert (seen, rig.labels()[-1]) == ([True], "read")


def test_a_layer_that_is_not_waited_for_is_read_too_early() -> None:
    rig, seen = Rig(slow(Queue.COPY)), []
    rig.mover.by_layer()  # promised and not kept
    rig.fill(Tier.HOST, 2, 5)
    reading(rig, seen, 5, 0)
    rig.load(2, 0)
    rig.compute(0, 1, start=PAGE)
    rig.device.settle()
    assert seen == [False]


def test_once_it_has_arrived_no_layer_waits() -> None:
    """The queue holds nothing but the engine's own work: decode steps cost nothing."""
    rig, good = Rig(slow(Queue.COPY)), []
    by_layer(rig, 5, good)
    rig.fill(Tier.HOST, 2, 5)
    rig.load(2, 0)
    rig.device.settle()
    waits: list[Queue] = []
    wait, rig.device.wait = rig.device.wait, lambda queue, event: waits.append(queue)  # type: ignore[method-assign]
    rig.compute(0, 1, start=PAGE)
    rig.device.wait = wait  # type: ignore[method-assign]
    rig.device.settle()
    assert (waits, good) == ([], [True] * 4)


@pytest.mark.parametrize("first", ["engine", "load"])
def test_a_slot_that_a_record_only_writes(first: str) -> None:
    """As a snapshot's is. The later of record and load is what the slot holds in the end, though the earlier one's queue is slow."""
    rig = Rig(slow(Queue.COMPUTE if first == "engine" else Queue.COPY))
    rig.mover.by_layer()
    rig.fill(Tier.HOST, 3, 1)

    def record() -> None:
        assert rig.mover.order is not None
        with rig.mover.order.computing({}, {rig.name: slots_array([0])}):
            rig.enqueue_fill(0, 2)

    for act in (record, lambda: rig.load(3, 0)) if first == "engine" else (lambda: rig.load(3, 0), record):
        act()
    rig.device.settle()
    assert rig.is_filled(Tier.DEVICE, 0, 1 if first == "engine" else 2)


def test_states_come_first_and_together() -> None:
    """An engine reads them before its first layer."""
    none = np.zeros(1, dtype=np.int64)
    parts = [replace(full(), name="a", layers=(0, 3)), replace(state(), name="s", layers=(1, 2)), replace(full(), name="b", layers=(0, 1))]
    steps = layer_steps([Leg(c, None, none, none) for c in parts])  # type: ignore[arg-type]
    assert [[(leg.component.name, layer) for leg, layer in step.parts] for step in steps] == [
        [("s", None)], [("a", 0), ("b", 0)], [("b", 1)], [("a", 1)],
    ]  # fmt: skip


# -- threads that touch host bytes themselves -------------------------------------------------------------------------------------


@FENCED
def test_storage_is_given_what_a_backup_has_brought(fenced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not fenced:
        monkeypatch.setattr(Order, "join", lambda *_, **__: None)
    rig = Rig(slow(Queue.COPY))
    rig.fill(Tier.DEVICE, 0, 1)
    rig.backup(0, 3)
    key = b"k" * KEY_BYTES
    assert rig.move(Tier.HOST, Tier.STORAGE, [3], [], (key,)).bits == (1,)
    out = bytearray(len(rig.stored(1)))
    assert rig.store.get([key + b"t" * 16], [memoryview(out)], 1.0) == 1
    assert (bytes(out) == rig.stored(1)) is fenced


@FENCED
def test_storage_fills_a_host_page_after_the_load_that_reads_it(fenced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not fenced:
        monkeypatch.setattr(Order, "join", lambda *_, **__: None)
    rig, key = Rig(slow(Queue.COPY)), b"k" * KEY_BYTES
    rig.store.put([key + b"t" * 16], [rig.stored(9)], 1.0)
    rig.fill(Tier.HOST, 3, 1)
    rig.load(3, 0)
    assert rig.move(Tier.STORAGE, Tier.HOST, [], [3], (key,)).bits == (1,)
    rig.device.settle()
    assert rig.is_filled(Tier.DEVICE, 0, 1) is fenced
    assert rig.is_filled(Tier.HOST, 3, 9)


def test_digests_are_of_what_is_enqueued() -> None:
    rig = Rig(slow(Queue.COMPUTE))
    rig.fill(Tier.DEVICE, 1, 4)
    want = rig.executor.execute(Digest(0, "r", {rig.name: slots_array([1])})).digests

    def engine(record: Compute) -> Outcome:
        rig.enqueue_fill(0, 4)
        return Outcome()

    rig.engine = engine
    rig.compute(0)
    assert rig.executor.execute(Digest(0, "r", {rig.name: slots_array([0])})).digests == want


def test_a_new_executor_begins_when_what_the_last_one_enqueued_is_done() -> None:
    rig = Rig(slow(Queue.COPY))
    rig.fill(Tier.DEVICE, 0, 1)
    rig.backup(0, 3)
    rig.executor._attach()
    assert rig.is_filled(Tier.HOST, 3, 1)


# -- failures -------------------------------------------------------------------------------------------------------------------------


def failing(device: FakeDevice, error: Exception, at: int) -> None:
    """The ``at``-th copy from now on cannot be enqueued."""
    copy, left = device.copy, [at]

    def once(pages: object, label: str) -> None:
        left[0] -= 1
        if not left[0]:
            raise error
        copy(pages, label)  # type: ignore[arg-type]

    device.copy = once  # type: ignore[method-assign]


def test_a_load_that_cannot_be_enqueued_has_not_arrived_and_holds_nobody_up() -> None:
    rig = Rig(slow(Queue.COPY))
    rig.fill(Tier.HOST, 3, 1)
    failing(rig.device, HiCacheError("no room in the queue"), at=3)
    outcome = rig.move(Tier.HOST, Tier.DEVICE, [3], [0])
    assert (outcome.bits, outcome.error) == ((), "rank 0: no room in the queue")
    rig.load(3, 0)
    rig.compute(0)
    rig.device.settle()
    assert rig.is_filled(Tier.DEVICE, 0, 1)


def test_a_device_that_fails_loses_the_group() -> None:
    rig = Rig(slow(Queue.COPY))
    failing(rig.device, GroupLost("an illegal address"), at=1)
    with pytest.raises(GroupLost, match="an illegal address"):
        rig.move(Tier.HOST, Tier.DEVICE, [3], [0])


def test_wrong_slots_are_refused_before_anything_is_enqueued() -> None:
    rig = Rig(slow(Queue.COPY))
    assert "target slot 6 is outside of the 6 slots" in rig.move(Tier.HOST, Tier.DEVICE, [0], [SLOTS]).error
    record = Compute(0, "r", 0, np.zeros(PAGE, dtype=np.int32), 1, 0, {rig.name: slots_array([SLOTS])})
    assert "names slot 6 of component" in rig.executor.execute(record).error
    rig.device.settle()
    assert rig.device.log == []


def test_what_never_ends_is_a_sentence() -> None:
    rig = Rig(slow(Queue.COPY))
    rig.device.wait(Queue.COPY, rig.device.mark(Queue.COMPUTE))
    order = rig.mover.order
    assert order is not None
    never = type(rig.device.mark(Queue.COPY))()
    rig.device.wait(Queue.COPY, never)
    rig.backup(0, 3)
    outcome = rig.move(Tier.HOST, Tier.STORAGE, [3], [], (b"k" * KEY_BYTES,))
    assert outcome.error == "rank 0: work of the copy queue did not end within 30 s"
    with pytest.raises(HiCacheError, match="the queues wait for each other"):
        rig.device.settle()


# -- several threads -----------------------------------------------------------------------------------------------------------------


def test_a_copy_waits_for_a_record_that_is_still_being_enqueued() -> None:
    """Leases keep such two apart; where they do not, the bytes are right all the same."""
    rig = Rig(slow(Queue.COMPUTE))
    inside, copied = Event(), Event()

    def engine(record: Compute) -> Outcome:
        inside.set()
        assert not copied.is_set()
        rig.enqueue_fill(0, 6)
        return Outcome()

    rig.engine = engine

    def copy() -> None:
        assert inside.wait(60)
        rig.backup(0, 3)
        copied.set()

    other = Thread(target=copy)
    other.start()
    rig.compute(0)
    other.join(60)
    assert copied.is_set()
    rig.device.settle()
    assert rig.is_filled(Tier.HOST, 3, 6)


def test_work_that_is_announced_and_never_enqueued() -> None:
    timeline = Timeline(FakeDevice(slow(Queue.COPY)), Queue.COPY, 0.01)
    number = timeline.reserve()
    with pytest.raises(HiCacheError, match=r"work of the copy queue was not enqueued within 0.01 s"):
        timeline.event(number)


def test_a_timeline_forgets_what_is_done_and_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies_queues, "EVENTS", 3)
    device = FakeDevice(slow(Queue.COPY))
    timeline = Timeline(device, Queue.COPY, 1.0)
    for _ in range(8):
        device.enqueue(Queue.COPY, lambda: None, "x")
        timeline.reserve()
        timeline.record()
    assert timeline.last() == 8
    assert timeline.finished() == 5  # the sixth to eighth are kept
    assert timeline.event(5) is None
    assert timeline.event(6) is not None
    device.settle()
    assert (timeline.finished(), timeline.event(8)) == (8, None)
