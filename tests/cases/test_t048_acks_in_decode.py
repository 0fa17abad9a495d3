"""T048: the acks of a backup are handled in a phase in which nothing but decode happens."""

from __future__ import annotations

import pytest

from hicache_ray.records import Compute
from hicache_ray.spec import Tier
from hicache_ray.testing import Stack, full
from tests.core.drive import Steps, is_move


@pytest.mark.parametrize("ranks", [1, 2])
def test_t048_acks_in_a_decode_only_phase(ranks: int) -> None:
    stack = Stack(page=4, pools={"full": full()}, ranks=ranks, l1=64)
    finished, other = list(range(1, 82)), list(range(1000, 1110))
    stack.begin(finished, "finished")
    stack.begin(other, "decoding", decoded=100)
    steps = Steps(stack)
    acks = [steps.until(lambda e: is_move(e, Tier.DEVICE, Tier.HOST))]
    acks += [steps.queue.pop(0) for _ in range(ranks - 1)]
    assert "finished" in stack.served
    pool = stack.res.pools[(Tier.DEVICE, "full")]
    leased = [len(x.slots) for x in stack.res.leases.open() if x.place == (Tier.DEVICE, "full") and x.holder != "decoding"]
    assert sum(leased) >= 20

    last = steps.until(lambda e: isinstance(e.record, Compute) and e.record.start >= 106)
    decoding = [e for e in stack.executed[0] if isinstance(e.record, Compute) and e.record.rid == "decoding"]
    assert len(decoding) > 20
    assert pool.idle == 0
    for envelope in acks:
        stack.run(envelope)
    assert not [x for x in stack.res.leases.open() if x.place == (Tier.DEVICE, "full") and x.holder != "decoding"]
    assert pool.idle == 20
    assert stack.have("l2", "full", finished) == set(range(20))
    free = pool.free
    stack.group.evict(Tier.DEVICE, {"full": free + 20})
    assert pool.free == free + 20
    assert "decoding" not in stack.served

    steps.queue.insert(0, last)
    steps.settle()
    assert stack.served["decoding"].computed == 10
    assert stack.read([*other, 0], "full") == stack.made([*other, 0], "full")
    stack.audit()
