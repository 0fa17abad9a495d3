"""Canonical bytes and others are different objects under one page key, and what is made from others is not canonical."""

from __future__ import annotations

from hicache_ray.keys import as_tokens, page_keys
from hicache_ray.spec import Tier
from hicache_ray.storage.faults import FaultyStore
from hicache_ray.storage.memory import MemoryStore
from hicache_ray.store import KEY_BYTES
from hicache_ray.testing import Stack, full, state, window
from tests.core.drive import at_rest, prompt

TOKENS = prompt(5, 640)


def stack(store: FaultyStore, exact: bool) -> Stack:
    return Stack(pools={"full": full(), "swa": window(100)}, grid=256, exact=exact, store=store, ranks=2)


def store() -> FaultyStore:
    return FaultyStore(MemoryStore(1 << 24))


def kinds(of: Stack, page: int) -> set[str]:
    """Which kinds of the full component's page L3 holds, on rank 0."""
    assert of.store is not None
    key = page_keys(of.ns, as_tokens(TOKENS))[page]
    tags = {i[KEY_BYTES:] for i in of.store.scan(key, 1.0)}
    return {name for name in ("full", "full~") if of.tags[name][0] in tags}


def test_what_a_partial_chunk_made_is_another_object_and_no_use_to_exact() -> None:
    shared = store()
    loose, exact = stack(shared, False), stack(shared, True)
    loose.put(TOKENS[:330])
    loose.settle()
    assert [kinds(loose, i) for i in range(5)] == [{"full"}] * 4 + [{"full~"}]
    assert loose.res.counters[(Tier.DEVICE, "full")].inserted == 5
    assert loose.res.counters[(Tier.DEVICE, "full")].inserted_other == loose.res.others((Tier.DEVICE, "full")) == 1
    assert loose.probe(TOKENS[:330]).reusable == 320
    assert exact.probe(TOKENS[:330]).reusable == 256


def test_what_reads_other_bytes_is_not_canonical_even_where_whole_chunks_made_it() -> None:
    shared = store()
    loose, exact = stack(shared, False), stack(shared, True)
    loose.put(TOKENS[:330])
    served = loose.put(TOKENS)  # resumes at 320, then the chunks [320, 512) and [512, 640)
    loose.settle()
    assert (served.l1, served.computed) == (320, 320)
    assert [kinds(loose, i) for i in range(10)] == [{"full"}] * 4 + [{"full~"}] * 6
    assert exact.probe(TOKENS).reusable == 256


def test_the_two_never_replace_each_other_and_the_canonical_one_is_preferred() -> None:
    shared = store()
    loose, exact = stack(shared, False), stack(shared, True)
    loose.put(TOKENS[:330])
    loose.put(TOKENS)
    loose.settle()
    served = exact.put(TOKENS)
    exact.settle()
    assert (served.l3, served.computed) == (256, 384)
    assert [kinds(exact, i) for i in range(10)] == [{"full"}] * 4 + [{"full", "full~"}] * 4 + [{"full~"}] * 2
    assert exact.probe(TOKENS).reusable == 512
    loose.flush()
    served = loose.put(TOKENS)
    loose.settle()
    assert served.l3 == 576
    # Pages 4 to 7 came as the canonical objects, so that only page 8 on the device is of the other kind.
    assert loose.res.others((Tier.DEVICE, "full")) == 1 + (loose.res.pools[(Tier.DEVICE, "full")].cached - 9)
    for s in (loose, exact):
        assert s.read(TOKENS, "full") == s.made(TOKENS, "full")
        at_rest(s)


def test_a_canonical_page_is_made_beside_the_other_one_in_the_same_cache() -> None:
    """A loose cache that resumes on the grid from canonical bytes makes canonical bytes, also where others are cached already."""
    loose = stack(store(), False)
    loose.put(TOKENS[:330])
    loose.settle()
    assert kinds(loose, 4) == {"full~"}
    served = loose.put(TOKENS, limit=256)
    loose.settle()
    assert served.l1 == 256
    assert kinds(loose, 4) == {"full", "full~"}
    assert loose.res.others((Tier.DEVICE, "full")) == 3  # the first page 4, and pages 8 and 9 of the partial chunk at the end
    assert loose.res.pools[(Tier.DEVICE, "full")].cached == 11
    at_rest(loose)


def test_decode_never_makes_canonical_bytes() -> None:
    loose = Stack(pools={"full": full(), "state": state(64)}, grid=64)
    loose.put(TOKENS[:256], decoded=128)
    loose.settle()
    assert loose.have("l1", "full", TOKENS[:256]) == {0, 1, 2, 3}
    assert loose.have("l1", "state", TOKENS[:256]) == {64, 128, 192, 256}
    assert loose.res.others((Tier.DEVICE, "full")) == loose.res.others((Tier.DEVICE, "state")) == 2
    assert loose.probe(TOKENS[:257]).reusable == 256
    loose.flush()
    assert loose.put(TOKENS[:257]).l3 == 256
    at_rest(loose)


def test_without_exact_a_repeated_prompt_resumes_at_its_last_whole_page() -> None:
    for count in (640, 639, 577, 576, 330, 257, 256, 65, 64, 1):
        loose = stack(store(), False)
        loose.put(TOKENS[:count])
        loose.settle()
        expected = (count - 1) // 64 * 64
        assert loose.put(TOKENS[:count]).l1 == expected
        loose.settle()
        loose.flush(l1=True, l2=False)
        assert loose.put(TOKENS[:count]).l2 == expected
        loose.settle()
        loose.flush()
        assert loose.put(TOKENS[:count]).l3 == expected
        loose.settle()
        at_rest(loose)
