"""T091: a promise is broken: 6 pages are promised, the load gives 4. What each side of a pair of prefill and decode group builds on: the
load says how far it came, the rest can be had again from whoever has it, and the KV is whole at the end. Pages go by way of storage;
sending them from group to group waits for prefill/decode disaggregation."""

from __future__ import annotations

import pytest

from hicache_ray.spec import Tier
from hicache_ray.testing import Served, Stack, full
from tests.core.drive import at_rest, prompt

PROMPT = prompt(91, 6 * 64 + 1)
AHEAD = [*PROMPT, *prompt(92, 20)]  # with what decode adds


def pair(ranks: int) -> tuple[Stack, Stack]:
    """A prefill group that has computed and stored the prompt, and a decode group over the same storage to which 6 pages are promised."""
    prefill = Stack(page=64, pools={"full": full(), "idx": full()}, ranks=ranks)
    assert prefill.put(PROMPT) == Served(0, 0, 0, 385)
    prefill.settle()
    decode = Stack(page=64, pools=prefill.pools, ranks=ranks, store=prefill.store)
    decode.prefetch("r", PROMPT)
    decode.settle()
    assert decode.poll("r").tokens == 384
    return prefill, decode


def whole(decode: Stack) -> None:
    decode.settle()
    for rank in range(decode.ranks):
        for pool in decode.pools:
            assert decode.read(AHEAD, pool, rank) == decode.made(AHEAD, pool, rank) != b""
    at_rest(decode)


def short(decode: Stack) -> None:
    """The load of page 4 fails for one component: 4 pages and no more are said to be there, and no lease is left for the others."""
    decode.fail_copy("l2", "l1", "idx", 4)
    assert decode.load("r") == 256
    assert decode.probe(PROMPT).l1 == 256
    assert 4 not in decode.have("l1", "idx", PROMPT)
    assert decode.res.counters[(Tier.DEVICE, "idx")].failures == 1
    decode.settle()
    at_rest(decode)


@pytest.mark.parametrize("ranks", [1, 2])
def test_t091_the_rest_is_asked_for_again(ranks: int) -> None:
    _, decode = pair(ranks)
    short(decode)
    assert decode.put(AHEAD, decoded=20) == Served(320, 64, 0, 1)  # page 5 had arrived, and page 4 is tried once more
    whole(decode)


@pytest.mark.parametrize("ranks", [1, 2])
def test_t091_the_rest_is_gone_and_prefill_stores_it_again(ranks: int) -> None:
    """Pages 4 and 5 have left the decode group's host and storage; who has asked for them is told so, and prefill makes them again."""
    prefill, decode = pair(ranks)
    short(decode)
    for pool in decode.pools:
        for tier in ("l1", "l2", "l3"):
            decode.drop(tier, pool, PROMPT, {4, 5})
    decode.prefetch("again", PROMPT)
    decode.settle()
    assert decode.poll("again").tokens == 256
    decode.abort("again")
    prefill.flush()
    assert prefill.put(PROMPT) == Served(0, 0, 256, 129)
    prefill.settle()
    assert decode.put(AHEAD, decoded=20) == Served(256, 0, 128, 1)
    whole(decode)


@pytest.mark.parametrize("ranks", [1, 2])
def test_t091_the_request_restarts(ranks: int) -> None:
    """Nobody has the rest: the decode group computes it itself."""
    _, decode = pair(ranks)
    short(decode)
    for pool in decode.pools:
        for tier in ("l1", "l2", "l3"):
            decode.drop(tier, pool, PROMPT, {4, 5})
    assert decode.put(AHEAD, decoded=20) == Served(256, 0, 0, 129)
    whole(decode)
