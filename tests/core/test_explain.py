"""Every cause that can keep a resume from being longer is named, with the first thing that the next longer one lacks."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis
from hypothesis import strategies as st

from hicache_ray.errors import StoreTimeout
from hicache_ray.explain import Explainer, _of, lines, ranges
from hicache_ray.explain_fields import differing_fields, foreign_fields
from hicache_ray.keys import page_keys, space_of
from hicache_ray.ledger import FLUSH, ROOM, Gone, Ledger
from hicache_ray.records import Move, Outcome
from hicache_ray.spec import Tier
from hicache_ray.testing import Stack, full, state
from tests.core.drive import Steps, is_move, prompt

PAGE = 64
HYBRID = {"full": full(), "state": state()}


def why(stack: Stack, tokens: list[int], rid: str = "asked", **more: Any) -> dict[str, Any]:
    stack.put(tokens, rid, **more)
    stack.settle()
    told = stack.explain(rid)
    json.dumps(told)  # plain data
    assert not any(str(token) in json.dumps(told["limit"]) for token in tokens[:1])
    assert lines(told)[0].startswith(f"request {rid}: resumed at ")
    return told


def cause(told: dict[str, Any]) -> str:
    return str(told["limit"]["cause"])


def test_sources_are_runs_of_pages_of_each_component_and_tier() -> None:
    stack = Stack(pools=HYBRID)
    tokens = prompt(1, 641)
    stack.put(tokens)
    stack.settle()
    stack.drop("l1", "full", tokens, [2, 3, 7])
    stack.drop("l2", "full", tokens, [7])
    told = why(stack, tokens)
    assert told["sources"]["full"] == {"device": [(0, 2), (4, 7), (8, 10)], "host": [(2, 4)], "storage": [(7, 8)]}
    assert told["sources"]["state"] == {"device": [(9, 10)]}
    assert (told["resumed_tokens"], told["planned_tokens"], told["most_tokens"]) == (640, 640, 640)
    assert (cause(told), told["longer"]) == ("none", None)
    legal = told["legal"]
    assert (legal["allowed"], legal["together"], legal["ranks"]) == ([(0, 11)], [(0, 11)], {})
    assert legal["components"]["full"] == {"any": [(0, 11)], "device": [(0, 3)], "host": [(0, 8)], "storage": [(0, 11)]}


def test_never_stored_and_what_comes_next() -> None:
    stack = Stack()
    tokens = prompt(1, 321)
    told = why(stack, tokens)
    key = page_keys(stack.ns, np.array(tokens, dtype=np.int32))[0][16:20].hex()
    assert (cause(told), told["longer"]["tokens"]) == ("never_stored", 64)
    (missing,) = told["longer"]["missing"]
    assert (missing["component"], missing["page"], missing["key"]) == ("full", 0, key)
    assert told["limit"]["sentence"].startswith(f"the page that ends at 64 of component 'full' (key {key}) was never stored")
    # A longer prompt over the same path: it lacks the first page beyond what there is.
    told = why(stack, [*tokens[:257], *prompt(2, 200)])
    assert (told["resumed_tokens"], cause(told), told["longer"]["tokens"], told["longer"]["missing"][0]["page"]) == (
        256,
        "never_stored",
        320,
        4,
    )


def test_evicted_when_and_for_whom() -> None:
    stack = Stack(l1=8, l2=4)
    stack.detach()
    mine, other = prompt(1, 257), prompt(2, 449)
    stack.put(mine, "mine")
    stack.settle()
    stack.clock.advance(10)
    stack.put(other, "the other")
    stack.settle()
    stack.clock.advance(5)
    told = why(stack, mine)
    assert cause(told) == "evicted"
    (missing,) = told["longer"]["missing"]
    assert missing["went"]["for"] == "backup of the other 2"  # its device pages are copies, and go for nothing
    assert (missing["went"]["at_s"], missing["went"]["ago_s"], missing["went"]["why"]) == (10.0, 5.0, "room")
    assert "was evicted from the" in told["limit"]["sentence"]
    assert "5.000 s before, for" in told["limit"]["sentence"]


def test_a_flush_is_told_as_one() -> None:
    stack = Stack()
    stack.detach()
    stack.put(prompt(1, 257))
    stack.settle()
    stack.flush()
    told = why(stack, prompt(1, 257))
    assert told["longer"]["missing"][0]["went"]["why"] == FLUSH
    assert told["longer"]["missing"][0]["went"]["for"].startswith("flush")


@pytest.mark.parametrize("how", ["flush", "drop"])
def test_what_a_flush_takes_is_not_ascribed_to_whoever_waited_for_it(how: str) -> None:
    stack = Stack()
    stack.detach()
    stack.put(prompt(1, 257))
    stack.settle()
    stack.begin(prompt(3, 257), "running")
    if how == "flush":
        name = stack.group.flush([Tier.DEVICE, Tier.HOST], timeout_s=10.0)
    else:
        name = stack.group.drop_space(space_of(stack.ns.digest()), 10.0)
    stack.begin(prompt(1, 257), "held back")
    stack.settle()
    told = stack.explain("held back")
    assert (cause(told), told["longer"]["missing"][0]["went"]["for"]) == ("evicted", name)


def test_another_namespace_and_which_field() -> None:
    stack = Stack()
    stack.put(prompt(1, 257), namespace={"revision": "two"})
    stack.settle()
    told = why(stack, prompt(1, 257))
    assert (cause(told), told["limit"]["fields"]) == ("other_namespace", ["revision"])
    assert "it differs in revision" in told["limit"]["sentence"]


def test_all_that_storage_is_asked_about_fields_has_one_deadline() -> None:
    """Ten namespaces, and a store that takes 0.3 s for every answer: after 2 s nothing more is asked."""
    stack = Stack()
    assert stack.store is not None
    for i in range(10):
        stack.store.describe(bytes([i]) * 32, {"page_size": "64", "revision": str(i)}, 1.0)
    why(stack, prompt(1, 257))
    kept = stack.explainer.find("asked")
    assert kept is not None
    for call in range(20):
        stack.store.fault("any", "delay", call + 1, seconds=0.3)
    began = stack.clock()
    for ask in (
        lambda: foreign_fields(stack.store, kept, stack.spec, {}, False, clock=stack.clock),  # type: ignore[arg-type]
        lambda: differing_fields(stack.store, stack.ns, np.flip(kept.first), stack.spec, {}, clock=stack.clock),  # type: ignore[arg-type]
    ):
        before = stack.store.planned()
        with pytest.raises(StoreTimeout, match="storage did not say within 2 s by what its objects differ"):
            ask()
        assert stack.clock() - began == pytest.approx(2.1)
        assert before - stack.store.planned() == 7
        began = stack.clock()


def test_objects_of_another_recipe() -> None:
    first = Stack(exact=True, grid=128, recipe={"threads": "1"})
    first.put(prompt(1, 257))
    first.settle()
    second = Stack(exact=True, grid=128, recipe={"threads": "2"}, store=first.store)
    told = why(second, prompt(1, 257))
    assert (cause(told), told["limit"]["fields"]) == ("other_objects", ["recipe.threads"])


@pytest.mark.parametrize(("capped", "want"), [((), "refused"), (("acme",), "quota")])
def test_refused_by_storage_or_over_the_quota(capped: tuple[str, ...], want: str) -> None:
    stack = Stack(l1=8, l2=8, namespace={"tenant": "acme"})
    stack.explainer = Explainer(stack.cache.settings, capped)
    stack.fail_copy("l2", "l3", "full", 1)
    stack.put(prompt(1, 257))
    stack.settle()
    for tier, pages in (("l1", range(4)), ("l2", range(4)), ("l3", [1])):
        stack.drop(tier, "full", prompt(1, 257), pages)
    told = why(stack, prompt(1, 257))
    assert (cause(told), told["resumed_tokens"], told["longer"]["missing"][0]["page"]) == (want, 64, 1)


@pytest.mark.parametrize("how", ["write_late", "write_failed", "write_detached", "dropped"])
def test_what_was_not_refused_is_not_called_refused(how: str) -> None:
    """Nor over a quota. What was dropped while it was written went with the drop."""
    stack = Stack(l1=8, l2=8, namespace={"tenant": "acme"})
    stack.explainer = Explainer(stack.cache.settings, ("acme",))
    stack.put(prompt(1, 257))
    steps = Steps(stack)
    write = steps.until(lambda e: is_move(e, Tier.HOST, Tier.STORAGE))
    if how == "write_late":
        stack.clock.advance(30.0)
        stack.group.tick()
    elif how == "write_failed":
        stack.report(write, Outcome(bits=(0,), error="injected"))
    elif how == "write_detached":
        stack.detach()
        stack.attach()
    else:
        stack.group.drop_space(space_of(stack.ns.digest()), 10.0)
        stack.report(write, Outcome(bits=(0,)))
    stack.settle()
    if how in ("write_late", "write_detached"):
        stack.report(write, Outcome(bits=(0,)))
    if how != "dropped":
        for tier in ("l1", "l2"):
            stack.drop(tier, "full", prompt(1, 257), range(4))
    told = why(stack, prompt(1, 257))
    assert (cause(told), told["longer"]["missing"][0]["went"]["why"]) == (("evicted", "drop") if how == "dropped" else (how, how))
    assert told["limit"]["sentence"].count("refused") == told["limit"]["sentence"].count("cap") == 0


@pytest.mark.parametrize("op", ["lookup", "get"])
def test_a_deadline(op: str) -> None:
    stack = Stack()
    stack.put(prompt(1, 257))
    stack.settle()
    stack.flush()
    if op == "lookup":
        assert stack.store is not None
        stack.store.fault("lookup", "error")
        assert cause(why(stack, prompt(1, 257))) == "lookup_failed"
        stack.flush()
        stack.store.fault("lookup", "lost")
        assert cause(why(stack, prompt(1, 257))) == "lookup"
        stack.flush()
        stack.begin(prompt(1, 257), "asked")
        held = stack.pending()
        stack.clock.advance(2)
        stack.group.tick()
        stack.settle()
        assert cause(stack.explain("asked")) == "lookup"
        for envelope in held:
            stack.run(envelope)
    else:
        stack.begin(prompt(1, 257), "asked")
        held = stack.pending()
        while not isinstance(held[0].record, Move):
            stack.run(held[0])
            held = stack.pending()
        stack.clock.advance(100)
        stack.group.tick()
        stack.settle()
        told = stack.explain("asked")
        assert (cause(told), told["planned_tokens"], told["resumed_tokens"]) == ("deadline", 256, 0)
        for envelope in held:
            stack.run(envelope)
    stack.settle()
    stack.audit()


def test_storage_that_cannot_deliver() -> None:
    stack = Stack()
    stack.put(prompt(1, 257))
    stack.settle()
    stack.flush()
    stack.fail_copy("l3", "l2", "full", 2)
    stack.begin(prompt(1, 257), "asked")
    while stack.cache.restore.fetches.counters.begun < 2:  # it is looked for once more
        for envelope in stack.pending():
            stack.run(envelope)
    stack.fail_copy("l3", "l2", "full", 0)
    stack.settle()
    told = stack.explain("asked")
    assert (cause(told), told["resumed_tokens"]) == ("unread", 128)


def test_the_threshold() -> None:
    stack = Stack(prefetch_threshold=512)
    stack.put(prompt(1, 257))
    stack.settle()
    stack.flush()
    told = why(stack, prompt(1, 257))
    assert cause(told) == "threshold"
    assert told["longer"] == {"tokens": 64, "missing": [], "otherwise": "too little to gain from storage (cache.prefetch_threshold)"}
    assert told["legal"]["together"] == [(0, 5)]


def test_host_capacity() -> None:
    stack = Stack(l1=16, l2=4)  # one of them is kept for what leaves the device
    stack.put(prompt(1, 513))
    stack.settle()
    stack.flush()
    told = why(stack, prompt(1, 513))
    assert (cause(told), told["resumed_tokens"], told["longer"]["tokens"]) == ("host_room", 192, 256)


def test_no_snapshot_there() -> None:
    stack = Stack(pools={"full": full(), "state": state(256)})
    stack.put(prompt(1, 513))
    stack.settle()
    told = why(stack, [*prompt(1, 449), 9, 9])
    assert (told["resumed_tokens"], cause(told), told["longer"]["tokens"]) == (256, "no_snapshot", 320)
    assert [m["component"] for m in told["longer"]["missing"]] == ["state"]
    assert told["legal"]["components"]["state"]["any"] == [(0, 1), (4, 5)]


def test_not_canonical() -> None:
    """The pages that decode has made are there for others; an exact group takes none of them."""
    stack = Stack(exact=False, grid=128)
    stack.put(prompt(1, 449), decoded=192)
    stack.settle()
    object.__setattr__(stack.cache.settings, "exact", True)
    told = why(stack, prompt(1, 449))
    assert (told["resumed_tokens"], cause(told), told["longer"]["tokens"]) == (256, "not_canonical", 384)
    assert told["longer"]["missing"][0]["page"] == 4


def test_the_callers_own_limit() -> None:
    stack = Stack()
    stack.put(prompt(1, 513))
    stack.settle()
    told = why(stack, prompt(1, 513), limit=200)
    assert (cause(told), told["resumed_tokens"], told["most_tokens"], told["longer"]) == ("caller", 192, 192, None)


def test_ranks_that_differ_are_told_apart() -> None:
    stack = Stack(ranks=2)
    tokens = prompt(1, 513)
    stack.put(tokens)
    stack.settle()
    stack.flush()
    stack.drop("l3", "full", tokens, [5], rank=1)
    told = why(stack, tokens)
    assert (told["resumed_tokens"], told["legal"]["ranks"]["full"]) == (320, [[(0, 9)], [(0, 6)]])
    assert any(line == "  full, rank 1: [0, 6)" for line in lines(told))


def test_a_failed_load() -> None:
    stack = Stack()
    stack.put(prompt(1, 257))
    stack.settle()
    stack.flush(l2=False)
    stack.fail_copy("l2", "l1", "full", 2)
    told = why(stack, prompt(1, 257))
    assert (cause(told), told["resumed_tokens"]) == ("load_failed", 128)


def test_a_request_that_failed_is_explained_too() -> None:
    stack = Stack()
    stack.begin(prompt(1, 257), "given up")
    stack.settle()
    stack.begin(prompt(2, 257), "given up too")
    stack.abort("given up too")
    stack.settle()
    told = stack.explain("given up too")
    assert told["error"].startswith("Cancelled")
    assert cause(told) == "not_planned"


def test_only_the_last_ones_are_kept_and_little_of_each() -> None:
    stack = Stack(l1=520, l2=1)
    stack.explainer = Explainer(stack.cache.settings, kept=3)
    for i in range(5):
        stack.put(prompt(1, 64 * 500), f"r{i}")
        stack.settle()
    assert len(stack.explainer) == 3
    assert stack.explainer.find("r1") is None
    assert len(json.dumps(stack.explain("r4"))) < 2000


@hypothesis(derandomize=True, deadline=None, max_examples=60)
@given(st.sets(st.integers(0, 200)))
def test_runs_cover_exactly(members: set[int]) -> None:
    runs = ranges(sorted(members))
    assert runs == _of(sum(1 << i for i in members))
    assert [i for first, last in runs for i in range(first, last)] == sorted(members)
    assert all(a[1] < b[0] for a, b in pairwise(runs))


# -- the ledger ----------------------------------------------------------------------------------------------------------------------


def test_regret_counts_what_had_to_go_and_was_missed_in_time() -> None:
    stack = Stack(l1=8, l2=4)
    stack.detach()
    ledger = stack.group.ledger
    for seed, wait in ((1, 0), (2, 0), (1, 299), (2, 301)):
        stack.clock.advance(wait)
        stack.put(prompt(seed, 449))
        stack.settle()
        ledger.check()
    gone = {t: ledger.evicted[(t, "full")] for t in (Tier.DEVICE, Tier.HOST)}
    missed = {t: ledger.regretted[(t, "full")] for t in (Tier.DEVICE, Tier.HOST)}
    assert all(gone.values())
    assert 0 < sum(missed.values()) <= 7  # of the first return; the second came too late
    assert ledger.regret()[(Tier.HOST, "full")] == missed[Tier.HOST] / gone[Tier.HOST]


@hypothesis(derandomize=True, deadline=None, max_examples=80)
@given(st.lists(st.tuples(st.sampled_from([Tier.DEVICE, Tier.HOST]), st.lists(st.integers(0, 12), max_size=7)), max_size=30))
def test_the_ledger_knows_the_last_ones_and_no_more(history: list[tuple[Tier, list[int]]]) -> None:
    places = [(tier, "full") for tier in Tier]
    ledger, twin = Ledger(places, size=8), []
    for now, (tier, pages) in enumerate(history):
        ledger.add(Gone((tier, "full"), tuple(map(name, pages)), ROOM), float(now), f"r{now}")
        twin = [*twin, *((page, tier, now) for page in pages)][-8:]
        ledger.check()
        for page in range(13):
            last = next((entry for entry in reversed(twin) if entry[0] == page), None)
            found = ledger.last("full", name(page))
            assert (found and (found.tier, found.when, found.cause)) == (last and (last[1], float(last[2]), f"r{last[2]}"))
    assert len(ledger) == len(twin)


def name(page: int) -> bytes:
    return bytes(16) + page.to_bytes(32, "big")[::-1]
