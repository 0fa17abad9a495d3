"""Frames of the tcp plane: the header of :mod:`~hicache_ray.storage.wire` under another magic; bytes of objects follow a frame raw.

    frame    magic 2s | version u8 | kind u8 | request u32 | body length u32 | body          little endian, no padding

Every request's body begins with ``seconds f64``: how long the caller waits. Bodies after that, and answers:

    LEASE     > ids                                        < lease u64 | hit bits | (length u64)* | (checksum u64)*     of the hits
    FETCH     > lease u64 | count u32 | (index u32)*       < present bits, then the bytes of those present, raw
    RELEASE   > lease u64 | count u32 | bad bits           < nothing; no answer at all where no bit is set
    RESERVE   > ids | (length u64)*                        < transfer u64 | wanted bits
    FILL      > transfer u64 | count u32 | (index u32)*, then raw: the bytes, then (checksum u64)*        < good bits
    SEAL      > transfer u64 | count u32                   < visible bits
    LOOKUP    > keys u32 | tags u32 | keys | tags          < (hit bits | pending bits | retry bits) per tag
    SCAN      > first page u8 | prefix length u16 | prefix < more pages u8 | ids
    DROP, CLEAR, DESCRIBE, DESCRIBED, STATS, PING    as of the arena
    EPOCH     > nothing                                    < epoch u64
    ANNOUNCE  > since u64 | name | ids                     < entered bits
    WITHDRAW  > name | ids                                 < nothing
    WHERE     > keys u32 | tags u32 | keys | tags          < names | per tag: (count u16 | (name u16 | bits)*)
    HOLDERS   > ids                                        < names | per id: (count u16 | (name u16)*)
    FORGET    > prefix length u16 | prefix                 < count u64
    FORGET_IDS > ids                                       < count u64
    FORGOTTEN > seconds f64                                < count u16 | (age f64 | prefix length u16 | prefix)*
    ERROR     < code u8 | text

    name      length u16 | text         names     count u16 | name*       a name u16 is an index into the names
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator, Mapping, Sequence

from hicache_ray.errors import StoreClosed, StoreError, StoreTimeout
from hicache_ray.storage import bits, wire
from hicache_ray.storage.connection import Refused
from hicache_ray.storage.messages import seconds, text
from hicache_ray.storage.wire import HEADER, MAX_BODY, Reader, WireError
from hicache_ray.store import KEY_BYTES, TAG_BYTES

MAGIC, VERSION = b"hT", 1
MAX_GREETING = 128  # bytes of a body before both ends have proved themselves
MAX_OBJECT = 1 << 40  # bytes; more is a mistake, not an object
INDEX = struct.Struct("<I")


class TcpKind(enum.IntEnum):
    CHALLENGE = 1
    PROOF = 2
    WELCOME = 3
    LEASE = 16
    FETCH = 17
    RELEASE = 18
    RESERVE = 19
    FILL = 20
    SEAL = 21
    LOOKUP = 32
    DROP = 33
    CLEAR = 34
    SCAN = 35
    DESCRIBE = 36
    DESCRIBED = 37
    STATS = 38
    PING = 39
    ANNOUNCE = 48
    WITHDRAW = 49
    WHERE = 50
    HOLDERS = 51
    FORGET = 52
    EPOCH = 53
    FORGOTTEN = 54
    FORGET_IDS = 55
    ERROR = 127


_KINDS = {int(kind): kind for kind in TcpKind}


class RefusedTimeout(Refused, StoreTimeout):
    """The server's own store did not answer in time. The server is well."""


class RefusedClosed(Refused, StoreClosed):
    """The server's own store is closed. The server is well."""


_REFUSALS: tuple[type[Refused], ...] = (Refused, RefusedTimeout, RefusedClosed)


def encode(kind: int, request: int, body: bytes) -> bytes:
    if len(body) > MAX_BODY:
        raise WireError(f"a frame of {len(body)} bytes is over the limit of {MAX_BODY}")
    return HEADER.pack(MAGIC, VERSION, kind, request, len(body)) + body


def decode_header(raw: bytes, flag: int, limit: int) -> tuple[TcpKind, int, int]:
    """(kind, request, body length); ``flag`` as of :class:`~hicache_ray.storage.wire.Splitter`. Raises WireError."""
    magic, version, kind, request, length = HEADER.unpack(raw)
    if magic != MAGIC or version != VERSION:
        raise WireError(f"not a frame of protocol version {VERSION}: it starts with {bytes(raw[:3])!r}")
    known = _KINDS.get(kind ^ flag)
    if known is None:
        raise WireError(f"unknown kind of frame {kind}")
    if length > limit:
        raise WireError(f"a frame of {length} bytes is over the limit of {limit}")
    return known, request, length


def parts(items: Sequence[bytes], size: int) -> Iterator[tuple[int, Sequence[bytes]]]:
    """(index of the first, at most ``size`` items) over all items."""
    for at in range(0, len(items), size):
        yield at, items[at : at + size]


def pack_error(error: StoreError) -> bytes:
    code = 1 if isinstance(error, StoreTimeout) else 2 if isinstance(error, StoreClosed) else 0
    return bytes([code]) + str(error).encode()[:1000]


def unpack_error(body: bytes, who: str) -> Refused:
    refusal = _REFUSALS[body[0]] if body and body[0] < len(_REFUSALS) else Refused
    return refusal(f"the store at {who} refused: {text(body[1:])}")


def pack_indices(owner: int, indices: Sequence[int]) -> bytes:
    return wire.number(owner, "Q") + wire.number(len(indices)) + wire.numbers("I", indices)


def unpack_indices(reader: Reader) -> tuple[int, list[int]]:
    owner, count = reader.number("Q"), reader.count()
    indices = reader.numbers("I", count)
    reader.end()
    return owner, indices


def pack_loans(lease: int, lengths: Sequence[int | None], checksums: Sequence[int | None]) -> bytes:
    """Of what was leased; None where an object is a miss."""
    hit = [i for i, length in enumerate(lengths) if length is not None]
    head = wire.number(lease, "Q") + wire.bitset(bits.pack(length is not None for length in lengths), len(lengths))
    return head + wire.numbers("Q", [lengths[i] or 0 for i in hit]) + wire.numbers("Q", [checksums[i] or 0 for i in hit])


def unpack_loans(reader: Reader, count: int) -> tuple[int, list[tuple[int, int, int]]]:
    """(lease, (index, length, checksum) of every hit)."""
    lease, hit = reader.number("Q"), list(bits.each(reader.bits(count)))
    lengths, sums = reader.numbers("Q", len(hit)), reader.numbers("Q", len(hit))
    reader.end()
    return lease, list(zip(hit, lengths, sums, strict=True))


def unpack_lengths(reader: Reader) -> tuple[list[bytes], list[int]]:
    ids = reader.ids()
    lengths = reader.numbers("Q", len(ids))
    reader.end()
    if lengths and max(lengths) > MAX_OBJECT:
        raise WireError(f"an object of {max(lengths)} bytes is over the limit of {MAX_OBJECT}")
    return ids, lengths


def unpack_question(reader: Reader) -> tuple[list[bytes], list[bytes]]:
    """(keys, tags). Their product bounds how long the server works on one frame."""
    keys, tags = reader.count(), reader.count(wire.MAX_ASKED)
    if keys * tags > wire.MAX_ASKED:
        raise WireError(f"a lookup of {keys} keys under {tags} tags is over the limit of {wire.MAX_ASKED}")
    found = reader.blobs(KEY_BYTES, keys), reader.blobs(TAG_BYTES, tags)
    reader.end()
    return found


# -- the directory -----------------------------------------------------------------------------------------------------------------


def pack_name(name: str) -> bytes:
    raw = name.encode()
    return wire.number(len(raw), "H") + raw


def unpack_name(reader: Reader) -> str:
    return text(reader.take(reader.number("H")))


def _pack_names(names: Sequence[str]) -> bytes:
    return wire.number(len(names), "H") + b"".join(map(pack_name, names))


def _unpack_names(reader: Reader) -> list[str]:
    return [unpack_name(reader) for _ in range(reader.number("H"))]


def pack_where(found: Mapping[bytes, Mapping[str, int]], tags: Sequence[bytes], count: int) -> bytes:
    names = list(dict.fromkeys(holder for tag in tags for holder in found.get(tag, {})))
    place = {name: wire.number(i, "H") for i, name in enumerate(names)}
    parts = [_pack_names(names)]
    for tag in tags:
        of_tag = found.get(tag, {})
        parts.append(wire.number(len(of_tag), "H"))
        parts += [place[holder] + wire.bitset(held, count) for holder, held in of_tag.items()]
    return b"".join(parts)


def unpack_where(reader: Reader, tags: Sequence[bytes], count: int) -> dict[bytes, dict[str, int]]:
    names = _unpack_names(reader)
    try:
        found = {tag: {names[reader.number("H")]: reader.bits(count) for _ in range(reader.number("H"))} for tag in tags}
        reader.end()
        return found
    except IndexError as error:
        raise WireError("an answer speaks of a holder that it does not name") from error


def pack_holders(found: Sequence[tuple[str, ...]]) -> bytes:
    names = list(dict.fromkeys(name for holders in found for name in holders))
    place = {name: i for i, name in enumerate(names)}
    parts = [_pack_names(names)]
    parts += [wire.number(len(holders), "H") + wire.numbers("H", [place[name] for name in holders]) for holders in found]
    return b"".join(parts)


def unpack_holders(reader: Reader, count: int) -> list[tuple[str, ...]]:
    names = _unpack_names(reader)
    try:
        found = [tuple(names[i] for i in reader.numbers("H", reader.number("H"))) for _ in range(count)]
        reader.end()
        return found
    except IndexError as error:
        raise WireError("an answer speaks of a holder that it does not name") from error


def pack_forgotten(found: Sequence[tuple[bytes, float]]) -> bytes:
    parts = [wire.real(age) + wire.number(len(prefix), "H") + prefix for prefix, age in found]
    return wire.number(len(parts), "H") + b"".join(parts)


def unpack_forgotten(reader: Reader) -> list[tuple[bytes, float]]:
    ages = []
    for _ in range(reader.number("H")):
        age = seconds(reader)
        ages.append((reader.take(reader.number("H")), age))
    reader.end()
    return ages
