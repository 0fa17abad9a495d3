"""Names of bytes: equal for equal prefixes, unlike for everything else, the same in every process."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_ray import keys
from hicache_ray.keys import ANY, Namespace, as_tokens, differing, extend_keys, object_record, page_keys, tag_of
from hicache_ray.spec import CacheSpec, Component, Field, Kind, Shard
from hicache_ray.store import DIGEST_BYTES, GROUP_BYTES, KEY_BYTES, SPACE_BYTES, TAG_BYTES

steady = settings(deadline=None, derandomize=True, max_examples=200)
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=60)
WORDS = st.sampled_from(["", "x", "y"])
NS = Namespace("llama", "main", "", "secret", 4)
KV = Component("full", Kind.FULL, (Field("k", 2, 8), Field("v", 2, 8)), (0, 1, 2))
SPEC = CacheSpec("any", 4, (KV,), 2)


@steady
@given(TOKENS, TOKENS, TOKENS, st.integers(1, 7))
def test_two_prompts_share_exactly_the_keys_of_their_common_pages(head: list[int], a: list[int], b: list[int], page: int) -> None:
    ns = replace(NS, page_size=page)
    left, right = as_tokens(head + a), as_tokens(head + b)
    one, two = page_keys(ns, left), page_keys(ns, right)
    assert (len(one), len(two)) == (len(left) // page, len(right) // page)
    assert all(len(k) == KEY_BYTES for k in one)
    assert len(set(one)) == len(one)
    for i in range(min(len(one), len(two))):
        assert (one[i] == two[i]) == bool(np.array_equal(left[: (i + 1) * page], right[: (i + 1) * page]))
    assert not {*one[len(two) :]} & {*two}


@steady
@given(TOKENS, st.integers(0, 60), st.integers(1, 7))
def test_keys_can_be_continued_from_any_part(tokens: list[int], part: int, page: int) -> None:
    ns, whole = replace(NS, page_size=page), as_tokens(tokens)
    known = page_keys(ns, whole[:part])
    assert extend_keys(ns, known, whole) == page_keys(ns, whole)


def test_tokens_of_other_types_and_strides_make_the_same_keys() -> None:
    expected = page_keys(NS, np.arange(24, dtype=np.int32))
    assert page_keys(NS, as_tokens(range(24))) == expected
    assert page_keys(NS, as_tokens(np.arange(24, dtype=np.int64))) == expected
    assert page_keys(NS, np.arange(24, dtype=">i4")) == expected  # type: ignore[arg-type]
    assert page_keys(NS, np.arange(48, dtype=np.int32)[::2] // 2) == expected


def test_token_ids_beyond_an_int32_are_refused_not_wrapped() -> None:
    with pytest.raises(OverflowError):
        as_tokens([2**32 + 5])


def test_every_field_of_the_namespace_makes_other_keys() -> None:
    prompt = as_tokens(range(100))
    base = Namespace("m", "r", "a", "s", 4)
    others = [replace(base, **{f.name: 5 if f.name == "page_size" else "other"}) for f in fields(Namespace)]
    assert len(others) == 6
    all_keys = [page_keys(ns, prompt) for ns in (base, *others)]
    assert len({key for chain in all_keys for key in chain}) == sum(map(len, all_keys))


@steady
@given(st.lists(st.text(max_size=6), min_size=4, max_size=4), st.lists(st.text(max_size=6), min_size=4, max_size=4))
def test_namespaces_are_equal_when_their_fields_are(a: list[str], b: list[str]) -> None:
    """Also where the fields run together to the same text."""
    assert (Namespace(*a).digest() == Namespace(*b).digest()) == (a == b)


def test_text_that_moves_between_fields_makes_another_namespace() -> None:
    one, two = Namespace("ab", "c"), Namespace("a", "bc")
    assert one.digest() != two.digest()
    inside = Namespace("m", 'r"\x00adapter\x00x', "")
    assert inside.digest() != Namespace("m", 'r"', "x").digest()


def read_back(data: bytes) -> list[bytes]:
    """The fields of an encoding in which each is preceded by its length in 8 bytes."""
    out = []
    while data:
        size = int.from_bytes(data[:8], "little")
        out.append(data[8 : 8 + size])
        data = data[8 + size :]
    return out


@steady
@given(st.lists(st.binary(max_size=12) | st.text(max_size=8), max_size=8))
def test_what_is_hashed_can_be_read_back(parts: list[str | bytes]) -> None:
    """The encoding is one that can be undone, so no two lists of fields share one."""
    raw = [p.encode() if isinstance(p, str) else p for p in parts]
    encoded = b"".join(len(r).to_bytes(8, "little") + r for r in raw)
    assert read_back(encoded) == raw
    assert keys._digest(parts) == hashlib.sha256(encoded).digest()


# -- golden values: they stand for other processes, machines and Python builds; a change of them empties every store ---------------------

GOLDEN_NAMESPACE = "e70cb35705e7aa9d1bf5e943acd2a659659d8250c4d5922b83f048adddac37ed"
GOLDEN_KEYS = (
    "e70cb35705e7aa9dbca6e33011c0c228bca6e33011c0c2289a79b6b2001152af504491e266b7414e6a349d98f030b338",
    "e70cb35705e7aa9dbca6e33011c0c2287bb8e1e3ad2fca2318267089903071cc48c50e8bbda75ebd164406ed233b437e",
)
GOLDEN_TAG = "00c1704b476f19ffbf8a506950cd7075"


def test_golden_keys() -> None:
    assert NS.digest().hex() == GOLDEN_NAMESPACE
    assert tuple(k.hex() for k in page_keys(NS, as_tokens([1, 2, 3, 4, 50000, 6, 7, 2**31 - 1, 9]))) == GOLDEN_KEYS
    assert tag_of(object_record(SPEC, KV, 1, {"grid": "256", "build": "x"})).hex() == GOLDEN_TAG


def test_golden_keys_by_hand() -> None:
    """The same from the definition, without a line of the product."""

    def digest(*parts: str) -> bytes:
        return hashlib.sha256(b"".join(len(p.encode()).to_bytes(8, "little") + p.encode() for p in parts)).digest()

    named = ("model", "llama", "revision", "main", "adapter", "", "salt", "secret", "page_size", "4", "tenant", "")
    root = digest("hicache_ray.namespace.2", *named)
    first = hashlib.sha256(root + (16).to_bytes(8, "little") + np.array([1, 2, 3, 4], dtype="<i4").tobytes()).digest()
    second = hashlib.sha256(first + (16).to_bytes(8, "little") + np.array([50000, 6, 7, 2**31 - 1], dtype="<i4").tobytes()).digest()
    made = tuple((root[:8] + first[:8] + d).hex() for d in (first, second))
    assert (root.hex(), made) == (GOLDEN_NAMESPACE, GOLDEN_KEYS)


def test_the_keys_of_a_namespace_begin_alike_and_those_of_a_path_are_in_at_most_two_groups() -> None:
    one, two = as_tokens(range(40)), as_tokens([*range(16), *range(100, 124)])
    long, fork = page_keys(NS, one), page_keys(NS, two)
    assert {keys.space_of(k) for k in (*long, *fork)} == {NS.digest()[:SPACE_BYTES]}
    assert keys.space_of(page_keys(replace(NS, tenant="other"), one)[0]) != keys.space_of(long[0])
    assert [keys.group_of(k) for k in long] == [long[0][-DIGEST_BYTES:][:GROUP_BYTES]] * 3 + [long[3][-DIGEST_BYTES:][:GROUP_BYTES]] * 7
    assert [keys.group_of(k) for k in fork] == [keys.group_of(k) for k in long]  # they share the pages that decide it
    assert keys.group_of(page_keys(NS, as_tokens([*range(12), *range(100, 128)]))[9]) != keys.group_of(long[9])
    assert [k[:-DIGEST_BYTES] for k in keys.look_ahead(long, one, 4, 1)] == [k[:-DIGEST_BYTES] for k in long[:9]]


SCRIPT = """
import json
from hicache_ray.keys import Namespace, as_tokens, object_record, page_keys, tag_of
from hicache_ray.spec import CacheSpec, Component, Field, Kind
kv = Component("full", Kind.FULL, (Field("k", 2, 8), Field("v", 2, 8)), (0, 1, 2))
ns = Namespace("llama", "main", "", "secret", 4)
keys = page_keys(ns, as_tokens([1, 2, 3, 4, 50000, 6, 7, 2**31 - 1, 9]))
tag = tag_of(object_record(CacheSpec("any", 4, (kv,), 2), kv, 1, {"build": "x", "grid": "256"}))
print(json.dumps([ns.digest().hex(), [k.hex() for k in keys], tag.hex(), hash("llama")]))
"""


def test_keys_do_not_depend_on_the_hash_seed() -> None:
    answers = []
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=60, check=True)
        answers.append(json.loads(done.stdout))
    (*one, hash_one), (*two, hash_two) = answers
    assert hash_one != hash_two  # the seeds do differ
    assert one == two == [GOLDEN_NAMESPACE, list(GOLDEN_KEYS), GOLDEN_TAG]


# -- tags and records ---------------------------------------------------------------------------------------------------------------------


def test_tags_differ_for_each_field() -> None:
    field = Field("k", 2, 8)
    changed: dict[str, tuple[CacheSpec, Component, int, dict[str, str]]] = {
        "nothing": (SPEC, KV, 0, {}),
        "rank": (SPEC, KV, 1, {}),
        "ranks": (SPEC.with_ranks(4), KV, 0, {}),
        "page": (replace(SPEC, page_size=16), KV, 0, {}),
        "recipe": (SPEC, KV, 0, {"grid": "256"}),
        "recipe value": (SPEC, KV, 0, {"grid": "512"}),
        "recipe name": (SPEC, KV, 0, {"threads": "256"}),
    }
    components = {
        "name": replace(KV, name="other"),
        "kind": replace(KV, kind=Kind.WINDOW, reach=8),
        "layers": replace(KV, layers=(0, 1)),
        "stage": replace(KV, layers=(3, 4, 5)),
        "span": replace(KV, page_span=2),
        "ratio": replace(KV, ratio=4),
        "replicated": replace(KV, shard=Shard.REPLICATED),
        "fewer fields": replace(KV, fields=(field,)),
        "order of fields": replace(KV, fields=KV.fields[::-1]),
        **{
            f"field {name}": replace(KV, fields=(replace(field, **{name: value}), KV.fields[1]))
            for name, value in (("name", "q"), ("heads", 1), ("width", 16), ("itemsize", 1), ("dtype", "float16"))
        },
    }
    changed |= {name: (SPEC, c, 0, {}) for name, c in components.items()}
    tags = {name: tag_of(object_record(*arguments)) for name, arguments in changed.items()}
    assert len(set(tags.values())) == len(tags) == 21
    assert all(len(t) == TAG_BYTES for t in tags.values())


def test_a_replicated_page_has_one_tag_whatever_the_rank_and_the_number_of_ranks() -> None:
    shared = replace(KV, shard=Shard.REPLICATED)
    tags = {tag_of(object_record(SPEC.with_ranks(n), shared, rank, ANY)) for n in (1, 2, 8) for rank in range(n)}
    assert len(tags) == 1


def test_the_order_of_a_recipe_does_not_matter_and_its_names_cannot_pose_as_geometry() -> None:
    one = tag_of(object_record(SPEC, KV, 0, {"a": "1", "b": "2"}))
    assert one == tag_of(object_record(SPEC, KV, 0, {"b": "2", "a": "1"}))
    record = object_record(SPEC, KV, 0, {"shard": "replicated"})
    assert record["shard"] == "heads 0 of 2"
    assert record["recipe.shard"] == "replicated"


@steady
@given(st.text(min_size=1, max_size=20))
def test_the_salt_is_never_readable(salt: str) -> None:
    """Nor is anything there from which it could be guessed: all salts have the same record."""
    record = replace(NS, salt=salt).record()
    assert record == {"model": "llama", "revision": "main", "adapter": "", "salt": "secret", "page_size": "4", "tenant": ""}
    assert repr(replace(NS, salt=salt)) == "Namespace(model='llama', revision='main', adapter='', page_size=4, tenant='')"


def test_no_salt_and_some_salt_can_be_told_apart() -> None:
    assert replace(NS, salt="").record()["salt"] == ""
    assert differing(replace(NS, salt="").record(), NS.record()) == ("salt",)


@steady
@given(st.fixed_dictionaries(dict.fromkeys(["model", "revision", "adapter", "salt", "tenant"], WORDS)), st.integers(1, 3))
def test_who_has_a_salt_is_told_exactly_what_differs(values: dict[str, str], page: int) -> None:
    mine, theirs = Namespace("x", "y", "", "x", 2, "y"), Namespace(**values, page_size=page)
    want = tuple(sorted(f.name for f in fields(mine) if getattr(mine, f.name) != getattr(theirs, f.name)))
    assert mine.differing(theirs.digest(), theirs.record()) == want


def test_a_record_of_another_form_is_compared_as_far_as_it_goes() -> None:
    assert NS.differing(b"?" * 32, {"model": "llama", "page_size": "many"}) == ("adapter", "page_size", "revision", "tenant")
    assert NS.differing(b"?" * 32, NS.record() | {"new": "1"}) == ("new", "salt")


def test_a_miss_names_every_field_that_differs() -> None:
    a, b = {"model": "m", "page": "4", "only a": "1"}, {"model": "m", "page": "8", "only b": "1"}
    assert differing(a, b) == ("only a", "only b", "page")
    assert differing(a, a) == ()
