"""T033: ranks see one order of records, whatever their delays, also a rank that has nothing to do."""

from __future__ import annotations

import random

from hicache_ray.group import STORE, Envelope
from hicache_ray.records import Move
from hicache_ray.testing import Stack, full


def test_t033_ranks_see_one_order() -> None:
    rng = random.Random(33)
    # A replicated page is written to storage by one rank; the others have nothing to do for it.
    stack = Stack(page=4, pools={"full": full(), "latent": full(shard="replicated")}, ranks=4, l1=24, l2=24, write_policy="write_through")
    queues: dict[int, list[Envelope]] = {rank: [] for rank in (STORE, 0, 1, 2, 3)}
    begun = 0
    for _ in range(200):
        act = rng.randrange(4)
        if act == 0 and len(stack.group.active()) < 5:
            head = rng.randint(0, 3) * 1000
            stack.begin([head + i for i in range(rng.randint(1, 60))], f"r{begun}", decoded=0)
            begun += 1
        elif act == 1 and begun:
            stack.abort(f"r{rng.randrange(begun)}")
        elif act == 2:
            stack.group.evict(rng.choice(list(stack.res.pools))[0], {"full": rng.randint(0, 8)})
            stack._collect()
        for _ in range(rng.randint(0, 9)):
            deliver(stack, queues, rng)
    while stack.group.next_deadline() is not None or any(queues.values()) or not stack.group.idle:
        if not deliver(stack, queues, rng):
            stack.step(1.0)
    stack.audit()
    sequences = [[(e.record.id, e.record.source, e.record.target) for e in done if isinstance(e.record, Move)] for done in stack.executed]
    assert len(sequences[0]) > 50
    assert all(sequence == sequences[0] for sequence in sequences)
    assert sum(error is not None for error in stack.errors.values()) > 0
    assert len(stack.served) > 10


def deliver(stack: Stack, queues: dict[int, list[Envelope]], rng: random.Random) -> bool:
    """Some rank, any of those with work, executes its next record."""
    for envelope in stack.pending():
        queues[envelope.rank].append(envelope)
    ready = [queue for queue in queues.values() if queue]
    if ready:
        stack.run(rng.choice(ready).pop(0))
    return bool(ready)
