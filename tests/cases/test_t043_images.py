"""T043: images. Placeholder ids say nothing of what they stand for; pages that an image touches are named by its content."""

from __future__ import annotations

import hashlib
import random

import pytest

from hicache_ray.errors import RequestRefused
from hicache_ray.keys import Namespace, as_tokens, extend_keys, look_ahead, page_keys
from hicache_ray.records import Embedded
from hicache_ray.testing import Served, Stack, full, window

NS = Namespace("vl", page_size=64)
PLACEHOLDER = 7
#: Text up to 200, an image of 300 placeholders, text again: the image touches pages 3 to 7 of 10.
PROMPT = as_tokens([*range(1000, 1200), *[PLACEHOLDER] * 300, *range(2000, 2140)])


def image(number: int) -> bytes:
    return number.to_bytes(32, "big")


def named(digest: bytes, start: int = 200, count: int = 300) -> tuple[bytes, ...]:
    return page_keys(NS, PROMPT, [Embedded(start, count, digest)])


def test_t043_two_images_that_agree_in_the_last_16_bits() -> None:
    one, two = image(0x1234_0000_BEEF), image(0x9876_0000_BEEF)
    assert one[-2:] == two[-2:]
    a, b = named(one), named(two)
    assert len(a) == len(b) == 10
    assert a[:3] == b[:3] == page_keys(NS, PROMPT)[:3]
    assert not {*a[3:]} & {*b[3:]}
    assert not {*a[3:]} & {*page_keys(NS, PROMPT)[3:]}
    assert named(one) == a


def test_t043_5000_random_images() -> None:
    chance = random.Random(43)
    images = [chance.getrandbits(256).to_bytes(32, "big") for _ in range(5000)]
    seen: set[bytes] = set()
    head = page_keys(NS, PROMPT)[:3]
    for one in images:
        keys = named(one)
        assert keys[:3] == head
        seen |= {*keys[3:]}
    assert len(seen) == 5000 * 7


def test_t043_where_an_image_lies_counts() -> None:
    """Also by less than a page, and which of two comes first; the order in which they are told does not."""
    one, two = image(1), image(2)
    assert len({named(one, start)[-1] for start in range(190, 210)}) == 20
    assert len({named(one, count=count)[-1] for count in (299, 300, 301)}) == 3
    both = [Embedded(200, 20, one), Embedded(220, 20, two)]
    assert page_keys(NS, PROMPT, both) == page_keys(NS, PROMPT, both[::-1])
    other = [Embedded(200, 20, two), Embedded(220, 20, one)]
    assert not {*page_keys(NS, PROMPT, both)[3:]} & {*page_keys(NS, PROMPT, other)[3:]}
    # One digest that ends as another begins: the lengths keep them apart.
    joined, parted = [Embedded(200, 20, one + two)], [Embedded(200, 20, one), Embedded(220, 20, two)]
    assert page_keys(NS, PROMPT, joined)[3] != page_keys(NS, PROMPT, parted)[3]


def test_t043_keys_go_on_and_text_alone_is_named_as_before() -> None:
    spans = [Embedded(200, 300, image(5))]
    whole = page_keys(NS, PROMPT, spans)
    for part in (0, 100, 256, 400, 640):
        assert extend_keys(NS, page_keys(NS, PROMPT[:part], spans), PROMPT, spans) == whole
    assert page_keys(NS, PROMPT, []) == page_keys(NS, PROMPT)
    assert hashlib.sha256(b"".join(page_keys(NS, PROMPT))).hexdigest() == TEXT


#: Of all keys of the prompt as text; a change of it empties every store.
TEXT = "2adf38ad189b5d1a25a50721e8b5d6941f777106af81556d4f66fed45ee53ad8"


def test_t043_a_draft_that_looks_into_an_image() -> None:
    """The last page before an image depends on what follows it where a component looks ahead."""
    keys = page_keys(NS, PROMPT[:192])
    start = [Embedded(192, 100, image(n)) for n in (1, 2)]
    ahead = [look_ahead(keys, PROMPT, 64, 1, [span]) for span in start]
    assert ahead[0][:2] == ahead[1][:2] == look_ahead(keys, PROMPT, 64, 1)[:2]
    assert len({ahead[0][2], ahead[1][2], look_ahead(keys, PROMPT, 64, 1)[2]}) == 3


@pytest.mark.parametrize("flushed", [False, True])
def test_t043_requests_share_the_text_before_an_image_and_nothing_after(flushed: bool) -> None:
    stack = Stack(page=64, pools={"full": full(), "swa": window(100)}, ranks=2)
    one, two = ((Embedded(200, 300, image(n)),) for n in (0x1_BEEF, 0x2_BEEF))
    stack.put(PROMPT, spans=one)
    stack.settle()
    if flushed:
        stack.flush()
    assert stack.probe(PROMPT, spans=two).reusable == 192
    assert stack.probe(PROMPT).reusable == 192
    tier = "l3" if flushed else "l1"
    assert stack.put(PROMPT, spans=two) == Served(**{"l1": 0, "l2": 0, "l3": 0, tier: 192, "computed": 448})
    assert stack.probe(PROMPT, spans=one).reusable == 576
    stack.settle()
    stack.audit()


@pytest.mark.parametrize(
    ("span", "why"),
    [
        (Embedded(-1, 5, image(1)), "inside of it"),
        (Embedded(0, 0, image(1)), "inside of it"),
        (Embedded(630, 11, image(1)), "inside of it"),
        (Embedded(3, 5, b"short"), "at least 16"),
    ],
)
def test_t043_spans_that_make_no_sense_are_refused(span: Embedded, why: str) -> None:
    with pytest.raises(RequestRefused, match=why):
        Stack().put(PROMPT, spans=(span,))
