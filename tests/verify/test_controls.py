"""Negative controls: what is wrong with a restored page, a state or a model must make verify fail, and say what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hicache_ray import copies
from hicache_ray.copies import Backend
from hicache_ray.families import FAMILIES
from hicache_ray.integrations.transformers import Loaded
from hicache_ray.keys import page_keys
from hicache_ray.layout import ORDERS
from hicache_ray.pool import Pool
from hicache_ray.spec import Tier
from hicache_ray.storage.memory import MemoryStore
from hicache_ray.storage.wrappers import StoreWrapper
from hicache_ray.store import Bytes
from hicache_ray.story import Request
from hicache_ray.verify import replica
from hicache_ray.verify.branching import Branching
from hicache_ray.verify.numbers import chunked, inexact
from hicache_ray.verify.replica import Replica
from hicache_ray.verify.restore import Restore
from hicache_ray.verify.result import Cell, Check, Verdict
from hicache_ray.verify.subject import Sizes, Subject, load

pytestmark = pytest.mark.model
SIZES = Sizes(16, 64, "float32")
#: Changes the pages in some slots of a pool.
Spoil = Callable[[Pool, list[int]], None]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Loaded]:
    made: dict[str, Loaded] = {}

    def get(family: str) -> Loaded:
        if family not in made:
            made[family] = load(family, SIZES, Path(tmp_path_factory.mktemp(family)))
        return made[family]

    return get


@pytest.fixture
def subject(models: Callable[[str], Loaded]) -> Callable[..., Subject]:
    def make(family: str, wrap: Callable[[MemoryStore], Any] = lambda store: store) -> Subject:
        return Subject(family, models(family), SIZES, wrap(MemoryStore(64 << 20)))

    return make


def restore(subject: Subject, tier: str, interfere: Callable[[Replica, Request], None], layout: str = "page_head") -> Check:
    return next(iter(Restore(subject, interfere).run([Cell(layout, "direct", "write_through", tier)])))


def rows(pool: Pool, field: int = 0) -> Any:
    """[slots, layers, tokens, heads, bytes]"""
    return pool.rows(pool.component.fields[field].name)


def flip_a_low_bit(pool: Pool, slots: list[int]) -> None:
    at = rows(pool)[slots[1], 0, 0, 0]
    at[0] = int(at[0]) ^ 1


def swap_heads(pool: Pool, slots: list[int]) -> None:
    rows(pool)[slots[1]] = rows(pool)[slots[1]].flip(2)


def shift_layers(pool: Pool, slots: list[int]) -> None:
    rows(pool)[slots[1]] = rows(pool)[slots[1]].roll(1, 0)


def stale(pool: Pool, slots: list[int]) -> None:
    """The last snapshot (page) becomes the one before it."""
    for f in range(len(pool.component.fields)):
        rows(pool, f)[slots[-1]] = rows(pool, f)[slots[-2]]


def in_pool(component: str, spoil: Spoil) -> Callable[[Replica, Request], None]:
    """Spoil what the tier above storage holds of the request's path: the host, or the device where that is all that would be read."""

    def interfere(replica: Replica, request: Request) -> None:
        entries = replica.res.index.find(page_keys(request.namespace, request.tokens))
        for tier, pools in ((Tier.DEVICE, replica.bench.pools), (Tier.HOST, replica.host)):
            slots = replica.res.index.slots((tier, component), entries)
            if (slots >= 0).any():
                spoil(pools[component], slots[slots >= 0].tolist())
                return
        raise AssertionError("nothing to spoil")

    return interfere


def in_store(component: str, wanted: int, instead: int, kind: str = "") -> Callable[[Replica, Request], None]:
    """One page's object becomes one with another's bytes: stored by the book, with the right tag and a right checksum.

    ``kind``: "~" for objects whose bytes are not canonical.
    """

    def interfere(replica: Replica, request: Request) -> None:
        keys, tag = page_keys(request.namespace, request.tokens), replica.tags[component + kind][0]
        size = replica.spec[component].page_bytes(replica.spec.page_size)
        other = bytearray(size)
        assert replica.store.get([keys[instead] + tag], [other], 5.0) == 1
        assert replica.store.drop([keys[wanted] + tag], 5.0) == 1
        assert replica.store.put([keys[wanted] + tag], [other], 5.0) == 1

    return interfere


@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.parametrize(("family", "component", "spoil", "page"), [
    ("qwen3_5", "full", flip_a_low_bit, 1),
    ("qwen3_5", "full", swap_heads, 1),
    ("gemma3", "full", shift_layers, 1),
    ("qwen3_5", "state", stale, 15),
    ("qwen3_5", "state", shift_layers, 15),
    ("deepseek_v4", "csa", stale, 15),
])  # fmt: skip
def test_wrong_bytes_in_a_pool_are_caught(
    subject: Callable[..., Subject], tier: str, family: str, component: str, spoil: Spoil, page: int
) -> None:
    chosen = spoil if component != "state" or spoil is stale else lambda pool, slots: spoil(pool, slots[-2:])
    check = restore(subject(family), tier, in_pool(component, chosen))
    assert check.verdict is Verdict.FAILED
    assert f"component '{component}', page {page}: the restored bytes are not those that were made" in check.problems
    if spoil is not flip_a_low_bit:
        assert any("logprobs differ" in p or "sampled tokens" in p for p in check.problems), check.problems


@pytest.mark.parametrize("tier", ["storage", "other replica"])
@pytest.mark.parametrize(("family", "component", "wanted", "instead"), [
    ("qwen3_5", "full", 3, 4),
    ("qwen3_5", "state", 15, 11),
    ("gemma3", "window", 14, 13),
    ("deepseek_v4", "hca", 13, 15),
])  # fmt: skip
def test_a_canonical_object_with_other_tokens_bytes_is_caught(
    subject: Callable[..., Subject], tier: str, family: str, component: str, wanted: int, instead: int
) -> None:
    check = restore(subject(family), tier, in_store(component, wanted, instead))
    assert check.verdict is Verdict.FAILED
    assert f"component '{component}', page {wanted}: the restored bytes are not those that were made" in check.problems
    assert any("logprobs differ" in p or "sampled tokens" in p for p in check.problems), check.problems


def test_less_reuse_than_the_rule_allows_is_caught(subject: Callable[..., Subject]) -> None:
    def interfere(replica: Replica, request: Request) -> None:
        keys = page_keys(request.namespace, request.tokens)
        replica.store.drop([keys[15] + replica.tags["state"][0]], 5.0)

    check = restore(subject("qwen3_5"), "storage", interfere)
    assert check.problems == ("storage 192, computed 109; it should be storage 256, computed 45 (no tier has what a longer resume needs)",)


def forget_pages(cache: Any) -> None:
    for table in cache.tables.values():
        table.past = table.skip = table.blank = 0
        table.read = table.slots[:0]


def forget_states(cache: Any) -> None:
    for layers in cache.states.values():
        for layer in layers:
            layer.load(0, 0)


@pytest.mark.parametrize(("family", "forget"), [
    ("llama", forget_pages), ("mistral", forget_pages), ("mamba2", forget_states), ("falcon_h1", forget_states),
])  # fmt: skip
def test_a_model_that_ignores_its_cache_is_caught(subject: Callable[..., Subject], family: str, forget: Callable[[Any], None]) -> None:
    it = subject(family)
    assert chunked(it).verdict is Verdict.PASSED
    hook = it.loaded.model.register_forward_pre_hook(lambda _, __, kwargs: forget(kwargs["cache"]), with_kwargs=True)
    try:
        check = chunked(it)
    finally:
        hook.remove()
    assert check.verdict is Verdict.FAILED
    assert "the model does not read all that it has cached" in check.problems[0]


def test_wrong_bytes_made_by_decode_are_caught(subject: Callable[..., Subject]) -> None:
    check = inexact(subject("qwen3_5"), in_store("full", 7, 6, "~"))
    assert "component 'full', page 7: the restored bytes are not those that were made" in check.problems
    assert any("the same run without the tier" in p for p in check.problems)
    assert any("which must agree within 0.0001" in p for p in check.problems)


@pytest.mark.parametrize("family", [name for name, f in FAMILIES.items() if f.decode])
def test_the_reason_for_another_decode_still_holds(subject: Callable[..., Subject], family: str) -> None:
    """Once transformers limits the time step in decode as well, the family needs no such word."""
    it = subject(family)
    spec = replace(it.spec, model_type="llama")  # whose decode is as its prefill
    check = inexact(replace(it, loaded=Loaded(it.loaded.model, spec)))
    assert len(check.problems) == 1
    assert "between the resume and a recompute" in check.problems[0]


def test_copies_that_mix_pages_up_are_named_by_their_axis(subject: Callable[..., Subject], monkeypatch: pytest.MonkeyPatch) -> None:
    """The io backend as a whole is wrong; the self-test of each cell says how."""

    def mixed(source: Any, target: Any, size: Any, loops: Any, stream: bool, begin: int, end: int) -> None:
        copies.move_with_numpy(np.roll(source, 1), target, size, loops, stream, begin, end)

    wrong = Backend("direct", "cpu", tuple(ORDERS), lambda: (mixed, ""))
    monkeypatch.setattr(replica, "choose", lambda *_: wrong)
    check = restore(subject("llama"), "host", lambda _replica, _request: None)
    assert "the way from the device to the host: the axis page is wrong" in check.problems[0]


class Flipping(StoreWrapper):
    """Gives one wrong bit in every read, verified."""

    def get(self, ids: Sequence[bytes], targets: Sequence[Bytes], timeout_s: float) -> int:
        got = self.inner.get(ids, targets, timeout_s)
        memoryview(targets[0]).cast("B")[0] ^= 1
        return got


def test_one_wrong_bit_in_a_conversation_is_caught(subject: Callable[..., Subject]) -> None:
    check = Branching(subject("qwen3_5", Flipping)).run()
    assert check.verdict is Verdict.FAILED
    assert any("the restored bytes are not those that were made" in p for p in check.problems)
