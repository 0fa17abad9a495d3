"""Names of bytes: page keys, object tags, and the readable records beside them.

The *page key* of page ``i`` ends in a sha256 chain over the namespace and all tokens up to the end of that page; it never depends on rank,
TP size or component. What is embedded in a prompt (an image) is hashed into every page that it touches. Before that stand the *space*, the
same in all keys of a namespace, and the *group*, the same in all keys of a path from page ``GROUP_PAGES - 1`` on: a store of many nodes
keeps what it knows of a group on one of them, so that it finds, and loses, prefixes as a whole. (The pages before that are in the group of
their first one: a path cannot know how it will go on.) A *tag* names one of the objects under a page key: component and geometry, shard,
recipe. Every hashed field is length-prefixed, so that no two lists of fields share an encoding. Nothing depends on the process (no
``hash()``, no dict order, native byte order fixed).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from hicache_ray.records import Embedded, Tokens
from hicache_ray.spec import CacheSpec, Component, Shard
from hicache_ray.store import DIGEST_BYTES, GROUP_BYTES, KEY_BYTES, SPACE_BYTES, TAG_BYTES

#: Pages of a path that decide its group. Part of the keys: another value empties every store.
GROUP_PAGES = 4

#: What a readable record says of a salt.
SALTED = "secret"

#: The recipe of bytes that no particular computation is promised for.
ANY: Mapping[str, str] = {}
#: What canonical bytes say of themselves beside what they depend on.
CANONICAL: dict[str, str] = {"bytes": "canonical"}
#: Marks the name of an object whose bytes are not canonical, and the component it is of in a table of tags.
OTHER = b"~"


@dataclass(frozen=True)
class Namespace:
    """Who may share pages: everything here is part of every page key. ``salt`` is a tenant's secret from trusted configuration;
    ``tenant`` its name, under which a store counts what it keeps."""

    model: str
    revision: str = ""
    adapter: str = ""
    salt: str = field(default="", repr=False)
    page_size: int = 64
    tenant: str = ""

    def record(self) -> dict[str, str]:
        """The readable form kept in the store. Of the salt it says only whether there is one: from any fingerprint, however slow to make,
        a weak salt could be guessed by whoever reads the store. Who has a salt does not need one: see :meth:`differing`."""
        out = {f.name: str(getattr(self, f.name)) for f in fields(self)}
        out["salt"] = SALTED if self.salt else ""
        return out

    def differing(self, digest: bytes, stored: Mapping[str, str]) -> tuple[str, ...]:
        """Names of the fields in which the namespace with this digest and this readable record differs from this one. The salts differ
        where a namespace of its other fields and this salt has another digest."""
        plain = differing(self.record() | {"salt": ""}, {**stored, "salt": ""})
        try:
            page_size = int(stored["page_size"])
            theirs = Namespace(stored["model"], stored["revision"], stored["adapter"], self.salt, page_size, stored["tenant"])
        except (KeyError, ValueError):  # a record of another form: nothing can be said of its salt
            return plain
        return plain if theirs.digest() == digest else tuple(sorted({*plain, "salt"}))

    def digest(self) -> bytes:
        """Root of the chains of this namespace, ``DIGEST_BYTES`` long; it begins with the namespace's space."""
        return _digest(("hicache_ray.namespace.2", *(x for f in fields(self) for x in (f.name, str(getattr(self, f.name))))))


def _digest(parts: Iterable[str | bytes]) -> bytes:
    h = hashlib.sha256()
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        h.update(len(raw).to_bytes(8, "little"))
        h.update(raw)
    return h.digest()


def as_tokens(tokens: Sequence[int] | Tokens) -> Tokens:
    """Token ids as the int32 array that the core works on."""
    return np.ascontiguousarray(tokens, dtype=np.int32)


def page_keys(namespace: Namespace, tokens: Tokens, spans: Sequence[Embedded] = ()) -> tuple[bytes, ...]:
    """Keys of the whole pages of ``tokens`` (int32): ``len(tokens) // page_size`` keys of ``KEY_BYTES`` bytes.

    ``spans``: what is embedded in them, in any order; pages before the first are named as if there were none.
    """
    return extend_keys(namespace, (), tokens, spans)


def extend_keys(namespace: Namespace, known: tuple[bytes, ...], tokens: Tokens, spans: Sequence[Embedded] = ()) -> tuple[bytes, ...]:
    """The same, given the keys of a first part of the pages."""
    return chain(namespace.digest(), namespace.page_size, known, tokens, spans)


def chain(root: bytes, size: int, known: tuple[bytes, ...], tokens: Tokens, spans: Sequence[Embedded] = ()) -> tuple[bytes, ...]:
    """The chain of page keys that starts at ``root``, continued over the whole pages of ``tokens`` from what is ``known``."""
    raw = np.ascontiguousarray(tokens, dtype="<i4").data.cast("B")
    head = (size * 4).to_bytes(8, "little")
    space = root[:SPACE_BYTES]
    digest = known[-1][-DIGEST_BYTES:] if known else root
    group = group_of(known[-1]) if known else b""
    out = list(known)
    for i in range(len(known), len(tokens) // size):
        h = hashlib.sha256(digest)
        h.update(head)
        h.update(raw[i * size * 4 : (i + 1) * size * 4])
        if spans:
            h.update(_embedded(spans, i * size, (i + 1) * size))
        digest = h.digest()
        if i in (0, GROUP_PAGES - 1):
            group = digest[:GROUP_BYTES]
        out.append(space + group + digest)
    return tuple(out)


def space_of(key: bytes) -> bytes:
    """What all keys of the same namespace begin with; also of a namespace's digest and of an object's id."""
    return key[:SPACE_BYTES]


def group_of(key: bytes) -> bytes:
    """The prefix group of a key, or of an object's id."""
    return key[SPACE_BYTES : SPACE_BYTES + GROUP_BYTES]


def _embedded(spans: Sequence[Embedded], begin: int, end: int) -> bytes:
    """What is embedded in ``[begin, end)``: where each begins from there, how long it is, its digest with its length. Nothing where
    nothing is, so that text is named as if there were no such thing; its length is known, so that nothing else is named alike."""
    here = sorted(span for span in spans if span.touches(begin, end))
    return b"".join(
        (span.start - begin).to_bytes(8, "little", signed=True)
        + span.count.to_bytes(8, "little")
        + len(span.digest).to_bytes(8, "little")
        + span.digest
        for span in here
    )


def look_ahead(keys: tuple[bytes, ...], tokens: Tokens, page_size: int, count: int, spans: Sequence[Embedded] = ()) -> tuple[bytes, ...]:
    """Keys of pages whose bytes also depend on the next ``count`` tokens (a draft's), as far as those are known."""
    raw = np.ascontiguousarray(tokens, dtype="<i4")
    known = max(0, min(len(keys), (len(raw) - count) // page_size))
    out = []
    for i, key in enumerate(keys[:known]):
        end = (i + 1) * page_size
        next_spans = [_embedded(spans, end, end + count)] if any(s.touches(end, end + count) for s in spans) else []
        out.append(key[:-DIGEST_BYTES] + _digest(("hicache_ray.ahead.1", key, raw[end : end + count].tobytes(), *next_spans)))
    return tuple(out)


def object_record(spec: CacheSpec, component: Component, rank: int, recipe: Mapping[str, str]) -> dict[str, str]:
    """What a tag stands for, readable: component, geometry, shard, recipe. Equal records make equal tags.

    For a rank that does not hold the component it is that of the first one that does, so that both have the same pages present.
    """
    owners = spec.owners(component)
    mine = owners.index(rank) if rank in owners else 0
    shard = f"heads {mine} of {len(owners)}" if component.shard is Shard.HEADS else "replicated"
    geometry = {
        "component": component.name,
        "kind": component.kind.value,
        "layers": ",".join(map(str, component.layers)),
        "page": str(spec.page_size * component.page_span),
        "ratio": str(component.ratio),
        "fields": ";".join(f"{f.name}:{f.heads}x{f.width}x{f.dtype}({f.itemsize})" for f in component.fields),
        "shard": shard,
    }
    return geometry | {f"recipe.{k}": v for k, v in sorted(recipe.items())}


def other(key: bytes) -> bytes:
    """The name, in the index, of the other object under a page key: the one whose bytes are not canonical.

    The two never replace each other.
    """
    return key + OTHER


def writer(spec: CacheSpec, component: Component, key: bytes, turn: int = 0) -> int:
    """Which rank stores what all that hold a component have alike under a key (or a name): chosen by the page, so that the work is spread,
    and by the turn, so that another one can do it."""
    owners = spec.owners(component)
    return owners[(page_of(key)[-1] + turn) % len(owners)]


def page_of(name: bytes) -> bytes:
    """The page key of a name."""
    return name[:KEY_BYTES]


def mark_of(name: bytes) -> int:
    """A number of 64 bits that stands for a name in tables of numbers; never 0."""
    return int.from_bytes(name[-8:], "little", signed=True) or 1


def is_other(name: bytes) -> bool:
    return len(name) > KEY_BYTES


def tagged(component: str, other_kind: bool) -> str:
    """How a component's objects of one kind are called in a table of tags and in the answer to a lookup."""
    return component + OTHER.decode() if other_kind else component


def tag_of(record: Mapping[str, str]) -> bytes:
    """The tag of an object record, ``TAG_BYTES`` long."""
    return _digest(("hicache_ray.object.1", *(x for pair in sorted(record.items()) for x in pair)))[:TAG_BYTES]


def differing(wanted: Mapping[str, str], stored: Mapping[str, str]) -> tuple[str, ...]:
    """Names of the fields in which two readable records differ: what a miss is told."""
    names = sorted(set(wanted) | set(stored))
    return tuple(n for n in names if wanted.get(n) != stored.get(n))
