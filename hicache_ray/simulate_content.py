"""What bytes stand for in the simulator: no byte is ever made, a slot holds the *content* that its bytes would be, as an int.

A content is a function of (component, rank, the tokens up to its end and, of a component that looks ahead, after it), and of whether
whole chunks of the grid have made it from bytes of that kind (canonical); and of the *generation* of its namespace, how often that had been
dropped when its request came. So a page in the wrong slot, of the wrong rank, of another prompt, half written, canonical by name only, or
from before a drop, shows wherever it is used. Contents that nobody may use are negative.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from hicache_ray.errors import Inconsistent
from hicache_ray.keys import KEY_BYTES, Namespace, as_tokens, look_ahead, page_keys, space_of
from hicache_ray.records import Embedded, Tokens
from hicache_ray.spec import CacheSpec, Shard

#: A slot that nobody has written to.
EMPTY = -1
#: What is in a slot after a failed read.
GARBAGE = -2
#: Below this: marks of those who are writing to a slot right now, of running states, of pages that are not full.
FIRST_MARK = -16
#: Contents of one generation are as many apart.
GENERATION = 1 << 44


class Violation(Inconsistent):
    """An invariant did not hold: the simulator has found a fault. No story can go on from there, or hide it."""


def violation_of(error: Exception) -> Violation:
    """What the core has found out itself, or stumbled over, is a violation as well."""
    return error if isinstance(error, Violation) else Violation(f"the core failed: {type(error).__name__}: {error}")


def guarded(call: Callable[[], None]) -> None:
    """Call into the core; refusals are the caller's, every other error is a violation."""
    try:
        call()
    except (Inconsistent, AssertionError, LookupError, ValueError, TypeError, AttributeError) as error:
        raise violation_of(error) from error


@dataclass
class Prompt:
    """A sequence of tokens, of which requests use beginnings, and what its pages stand for.

    ``ids[i]``: of the bytes up to the end of page ``i``. ``ahead[n][i]``: the same with the next ``n`` tokens. ``spans``: what is embedded.
    """

    namespace: Namespace
    tokens: Tokens
    values: list[int]
    keys: tuple[bytes, ...]
    ids: list[int]
    ahead: dict[int, list[int]] = field(default_factory=dict)
    spans: tuple[Embedded, ...] = ()

    @property
    def space(self) -> bytes:
        return space_of(self.namespace.digest())


class Contents:
    """All prompts of a world, and what each key of theirs names."""

    def __init__(self, spec: CacheSpec) -> None:
        self.spec = spec
        self._numbers: dict[bytes, int] = {}
        self._named: dict[bytes, int] = {}
        self._index = {c.name: i for i, c in enumerate(spec.components)}
        self._stride = len(spec.components) * spec.ranks * 2
        self._shift = {c.name: [rank if c.shard is Shard.HEADS else 0 for rank in range(spec.ranks)] for c in spec.components}
        self._pages: dict[bytes, int] = {}
        self._aheads = sorted({c.lookahead for c in spec.components if c.lookahead})
        self._mark = FIRST_MARK
        self.generations: dict[bytes, int] = {}  # of each space: how often a drop of it has begun

    def prompt(self, namespace: Namespace, tokens: Sequence[int], spans: Sequence[Embedded] = ()) -> Prompt:
        """Learn a sequence."""
        array, page = as_tokens(tokens), self.spec.page_size
        keys = page_keys(namespace, array, spans)
        chain = hashlib.blake2b(repr(namespace).encode(), digest_size=8).digest()
        chains, raw = [], np.ascontiguousarray(array, dtype="<i4").tobytes()
        for i in range(len(keys)):
            text = raw[i * page * 4 : (i + 1) * page * 4] + _touching(spans, i * page, (i + 1) * page)
            chain = hashlib.blake2b(chain + text, digest_size=8).digest()
            chains.append(chain)
        out = Prompt(namespace, array, array.tolist(), keys, [self._number(c) for c in chains], spans=tuple(spans))
        self._named.update(zip(keys, out.ids, strict=True))
        self._pages.update(zip(keys, range(len(keys)), strict=True))
        for count in self._aheads:
            names = look_ahead(keys, array, page, count, spans)
            ends = [(i + 1) * page for i in range(len(names))]
            next_text = [raw[end * 4 : (end + count) * 4] + _touching(spans, end, end + count) for end in ends]
            out.ahead[count] = [self._number(c + text) for c, text in zip(chains, next_text, strict=False)]
            self._named.update(zip(names, out.ahead[count], strict=True))
            self._pages.update(zip(names, range(len(names)), strict=True))
        return out

    def _number(self, what: bytes) -> int:
        return self._numbers.setdefault(what, len(self._numbers))

    def made(self, component: str, rank: int, number: int, canonical: bool) -> int:
        """The content of a page (snapshot) of one rank."""
        at = self._index[component] * self.spec.ranks + self._shift[component][rank]
        return number * self._stride + at * 2 + canonical

    def of_name(self, component: str, rank: int, name: bytes) -> int:
        """What is called ``name`` in the index of a group."""
        return self.made(component, rank, self._named[name[:KEY_BYTES]], len(name) == KEY_BYTES)

    def owns(self, component: str, rank: int, name: bytes) -> bool:
        """Whether a rank holds its part of what is called ``name``."""
        return self.spec.owns(self.spec[component], rank, self._pages[name[:KEY_BYTES]])

    def mark(self) -> int:
        """A content that is like no other."""
        self._mark -= 1
        return self._mark

    def drop_begins(self, space: bytes) -> int:
        """Whatever is made for requests that come from now on is of another generation, which is returned."""
        self.generations[space] = self.generations.get(space, 0) + 1
        return self.generations[space]


def _touching(spans: Sequence[Embedded], begin: int, end: int) -> bytes:
    """What is embedded in ``[begin, end)``, whatever its place in a key may be."""
    return "".join(repr(span) for span in sorted(spans) if span.touches(begin, end)).encode()


def is_of(content: int, named: int, least: int = 0) -> bool:
    """Whether a content is what ``named`` says, canonical or not as it says, of generation ``least`` or a later one."""
    return content >= 0 and content % GENERATION == named and content // GENERATION >= least


def same_page(content: int, named: int, least: int = 0) -> bool:
    """The same, canonical or not."""
    return content >= 0 and content % GENERATION | 1 == named | 1 and content // GENERATION >= least
