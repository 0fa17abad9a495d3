"""T009: a snapshot belongs to its batch's own length, whatever has been launched or reported meanwhile."""

from __future__ import annotations

import random
from dataclasses import replace

from hicache_ray.group import Envelope
from hicache_ray.records import Compute, Outcome, slots_array
from hicache_ray.testing import Stack, full, state

TOKENS = list(range(1, 130))
OTHER = list(range(5000, 5200))


def step(record_id: int, start: int, snapshots: tuple[tuple[int, int], ...]) -> Compute:
    """One decode step over the first two pages."""
    tables = {"full": slots_array([0, 1])}
    feed = slots_array([TOKENS[start]])
    return Compute(record_id, "r", start, feed, 1, 0, tables, {"state": 0}, {"state": -1}, {"state": snapshots})


def test_t009_two_steps_in_flight() -> None:
    """Step A makes 127, step B makes 128, B is executed before A's report is handled: the snapshot is B's, with B's bytes."""
    stack = Stack(page=64, pools={"full": full(), "state": state(128)})
    stack._prompts["r"] = slots_array(TOKENS)
    a, b = step(1, 126, ()), step(2, 127, ((128, 3),))
    assert (a.end, b.end) == (127, 128)
    engine, component = stack._engines[0], stack.spec["state"]
    engine.run(replace(step(0, 0, ()), feed=slots_array(TOKENS[:126])))

    def slot() -> bytes:
        return engine.read(component, 3)

    empty = slot()
    reports: list[tuple[Compute, Outcome]] = [(a, engine.run(a))]
    assert slot() == empty
    reports.insert(0, (b, engine.run(b)))  # handled first, or last: the record says which length it is
    assert slot() == engine.content(component, slots_array(TOKENS), 128)
    assert [r.snapshots["state"] for r, _ in reports] == [((128, 3),), ()]


def test_t009_a_hundred_interleavings() -> None:
    """A request decodes over length 128 while another's prefill, backup and reads go on; reports come in any order."""
    for seed in range(100):
        rng = random.Random(seed)
        stack = Stack(page=64, pools={"full": full(), "state": state(128)}, ranks=2)
        stack.put(OTHER[:130], "before")
        stack.begin(TOKENS, "r", decoded=3)  # prompt 126: the first step ends at 127, the second at 128
        stack.begin(OTHER, "other")
        waiting: list[list[Envelope]] = [[], [], []]
        reports: list[tuple[Envelope, Outcome]] = []
        made: set[int] = set()
        while True:
            for envelope in stack.pending():
                waiting[envelope.rank].append(envelope)
            queues = [q for q in waiting if q]
            if queues and (not reports or rng.random() < 0.5):
                envelope = rng.choice(queues).pop(0)
                reports.append((envelope, stack.execute(envelope)))
                if isinstance(envelope.record, Compute) and envelope.record.rid == "r":
                    own = {n for n, _ in envelope.record.snapshots["state"]}
                    assert all(envelope.record.start < n <= envelope.record.end for n in own)
                    made |= own
            elif reports:
                stack.report(*reports.pop(rng.randrange(len(reports))))
            else:
                break
            if "r" not in stack.served:
                assert stack.have("l1", "state", TOKENS) == set()  # nothing is visible before its completion
        assert stack.have("l1", "state", TOKENS) == made == {128}
        longer = [*TOKENS, 7]
        assert stack.probe(longer).l1 == 128
        for rank in range(2):
            assert stack.read(longer, "state", rank) == stack.made(longer, "state", rank)
            assert stack.read(longer, "full", rank) == stack.made(longer, "full", rank)
        stack.settle()
        stack.audit()


def test_t009_the_bytes_of_the_step_before_would_show() -> None:
    """The comparison above tells the state after 127 from that after 128."""
    stack = Stack(page=64, pools={"full": full(), "state": state(128)})
    stack.put(TOKENS)
    engine, component = stack._engines[0], stack.spec["state"]
    right = stack.made([*TOKENS, 7], "state")
    assert right == engine.content(component, slots_array(TOKENS), 128) != engine.content(component, slots_array(TOKENS), 127)
    assert replace(component).lo(128) == 128
