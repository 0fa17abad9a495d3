"""T041: identity. What changes whose page keys, what changes only objects, and that a miss names the field."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from hicache_ray.keys import Namespace, as_tokens, page_keys
from hicache_ray.spec import Component, Field
from hicache_ray.testing import Stack, full

PROMPT = list(range(1, 300))
BASE: dict[str, str] = {"model": "llama", "revision": "r1", "adapter": "", "salt": "tenant"}


def stack_of(component: Component | None = None, namespace: dict[str, str] | None = None, **more: Any) -> Stack:
    return Stack(pools={"full": component or full()}, namespace=namespace or BASE, **more)


@pytest.mark.parametrize(
    ("field", "changed"),
    [
        ("model", {"namespace": BASE | {"model": "qwen"}}),
        ("revision", {"namespace": BASE | {"revision": "r2"}}),
        ("adapter", {"namespace": BASE | {"adapter": "lora-7"}}),
        ("salt", {"namespace": BASE | {"salt": "other tenant"}}),
        ("page_size", {"page": 32}),
    ],
)
def test_t041_these_change_the_page_keys(field: str, changed: dict[str, Any]) -> None:
    one = stack_of()
    one.put(PROMPT)
    one.settle()
    two = stack_of(store=one.store, **changed)
    keys_of = [set(page_keys(s.ns, as_tokens(PROMPT))) for s in (one, two)]
    assert not keys_of[0] & keys_of[1]
    found = two.probe(PROMPT)
    assert (found.l1, found.l2, found.l3) == (0, 0, 0)
    assert found.differs == (field,)
    assert two.put(PROMPT).computed == len(PROMPT)
    two.settle()
    assert (one.probe(PROMPT).l3, two.probe(PROMPT).l3) == (256, 288 if field == "page_size" else 256)  # side by side, each its own
    assert two.probe(PROMPT).differs == ()


WIDE = (Field("k", 2, 4, 1, "float8_e4m3fn"), Field("v", 2, 4, 1, "float8_e4m3fn"))
HALF = (Field("k", 1, 4), Field("v", 1, 4))


@pytest.mark.parametrize(
    ("fields", "changed"),
    [
        (("fields",), {"component": full(fields=WIDE)}),
        (("fields", "shard"), {"component": full(fields=HALF), "ranks": 2}),
        (("layers",), {"component": replace(full(), layers=(2, 3))}),
        (("recipe.grid",), {"recipe": {"grid": "512"}}),
    ],
    ids=["kv dtype", "head split", "pipeline stage", "grid"],
)
def test_t041_these_change_the_objects_under_equal_page_keys(fields: tuple[str, ...], changed: dict[str, Any]) -> None:
    one = stack_of(recipe={"grid": "256"}, exact=True, grid=64)
    one.put(PROMPT)
    one.settle()
    more = {"recipe": {"grid": "256"}, "exact": True, "grid": 64} | changed
    two = stack_of(more.pop("component", None), store=one.store, **more)
    assert page_keys(one.ns, as_tokens(PROMPT)) == page_keys(two.ns, as_tokens(PROMPT))
    assert not set(one.tags["full"]) & set(two.tags["full"])
    found = two.probe(PROMPT)
    assert (found.l1, found.l2, found.l3) == (0, 0, 0)
    assert found.differs == fields
    assert two.put(PROMPT).computed == len(PROMPT)
    two.settle()
    for stack in (one, two):
        assert stack.probe(PROMPT).l3 == 256
        stack.flush()
        stack.put(PROMPT)
        assert stack.read(PROMPT, "full") == stack.made(PROMPT, "full")


SCRIPT = """
import json
from hicache_ray.keys import Namespace, as_tokens, object_record, page_keys, tag_of
from hicache_ray.spec import CacheSpec, Component, Field, Kind
ns = Namespace("llama", "r1", "", "tenant", 64)
kv = Component("full", Kind.FULL, (Field("k", 2, 4), Field("v", 2, 4)), (0, 1))
tag = tag_of(object_record(CacheSpec("test", 64, (kv,), 1), kv, 0, {"bytes": "canonical", "grid": "256"}))
print(json.dumps([[k.hex() for k in page_keys(ns, as_tokens(range(1, 300)))], tag.hex()]))
"""


def test_t041_an_equal_configuration_in_another_process_has_equal_identities() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=True)
    keys, tag = json.loads(done.stdout)
    stack = stack_of(recipe={"grid": "256"})
    assert keys == [k.hex() for k in page_keys(Namespace(**BASE), as_tokens(PROMPT))]  # type: ignore[arg-type]
    assert tag == stack.tags["full"][0].hex()


def test_t041_a_stranger_names_nothing() -> None:
    """Where no prompt of the store comes near, no field is blamed."""
    one = stack_of()
    one.put(PROMPT)
    one.settle()
    assert stack_of(store=one.store).probe([9] * 300).differs == ()
