"""Bodies of the messages that carry more than ids: what is packed on one side is unpacked here for the other.

    HELLO    > nothing                          < incarnation 8s | segments u16 | (data bytes u64 | path length u16 | path)*
    LOOKUP   > keys u32 | tags u32 | keys | tags                  < (hit bits | pending bits | retry bits) per tag
    RESERVE  > ids | lengths u64* | seconds f64                   < reservation u64 | seconds f64 | outcomes u8* | offsets u64*
    SEAL     > reservation u64 | count u32 | done bits | checksums u64*                    < sealed bits
    SEAL     > the same of one | length u64                  < sealed bits | a spare slot for that many bytes, or nothing
    WRITE    > spare u64 | id | length u64 | checksum u64 | generation u64        < outcome u8 | a spare slot, or nothing
    LEASE    > ids | seconds f64       < lease u64 | seconds f64 | hit bits | (offset | length | checksum | generation: u64 each)*
    RELEASE  > lease u64 | count u32 | bad bits                   no reply
    DROP     > ids                                                < bits of those that existed
    SCAN     > cursor u32 | prefix length u16 | prefix            < next cursor u32 (0: the end) | ids
    DESCRIBE > digest length u16 | digest | JSON object           < nothing
    CLEAR    > prefix length u16 | prefix                         < count u64
    DESCRIBED < JSON object     STATS < JSON object     PING < what was sent     ERROR < text
    MEMBERS  > nothing                          < JSON object (see :mod:`~hicache_ray.storage.membership`)

A spare slot (see :mod:`~hicache_ray.storage.spares`) is number u64 | seconds f64 | offset u64 | size u64.
Bits are bitsets of whole bytes; a star repeats what is before it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hicache_ray.errors import StoreError
from hicache_ray.storage import wire
from hicache_ray.storage.descriptors import OUTCOMES, U64, Lease, Reservation, Sums
from hicache_ray.storage.ids import Ids
from hicache_ray.storage.wire import Reader, WireError
from hicache_ray.store import KEY_BYTES, TAG_BYTES, Answer, StoreStats

_CLAIM = struct.Struct("<Qd")
#: Whole bodies of messages about one object.
ASK_RESERVE_ONE, RESERVATION_ONE = struct.Struct("<I64sQd"), struct.Struct("<QdBQ")
SEAL_ONE, SEAL_AND_LEND, WRITE = struct.Struct("<QIBQ"), struct.Struct("<QIBQQ"), struct.Struct("<Q64sQQQ")
READY = struct.Struct("<QdQQ")
RELEASE_ONE = struct.Struct("<QIB")
ASK_LEASE_ONE, MISS_ONE, LEASE_ONE = struct.Struct("<I64sd"), struct.Struct("<QdB"), struct.Struct("<QdB4Q")
_MOST_DIGEST = 0xFFFF
_COUNTERS: dict[str, type] = {"tenants": dict, "writes_off": str}  # the others are numbers


class Hello(NamedTuple):
    """``segments``: (path, data bytes) of each; one today."""

    incarnation: str
    segments: list[tuple[str, int]]


def pack_hello(hello: Hello) -> bytes:
    parts = [bytes.fromhex(hello.incarnation), wire.number(len(hello.segments), "H")]
    for path, size in hello.segments:
        raw = path.encode()
        parts += [wire.number(size, "Q"), wire.number(len(raw), "H"), raw]
    return b"".join(parts)


def unpack_hello(reader: Reader) -> Hello:
    incarnation, segments = reader.take(8).hex(), []
    for _ in range(reader.number("H")):
        size = reader.number("Q")
        segments.append((text(reader.take(reader.number("H"))), size))
    reader.end()
    if len(segments) != 1:
        raise WireError(f"this client maps one segment, the service names {len(segments)}")
    return Hello(incarnation, segments)


def pack_lookup(keys: Sequence[bytes], tags: Sequence[bytes]) -> bytes:
    return b"".join((wire.number(len(keys)), wire.number(len(tags)), *keys, *tags))


def unpack_lookup(reader: Reader) -> tuple[npt.NDArray[np.uint8], list[bytes]]:
    """((n, 48) uint8 keys, tags)."""
    keys, tags = reader.count(), reader.count(wire.MAX_ASKED)
    if keys * tags > wire.MAX_ASKED:
        raise WireError(f"a lookup of {keys} keys under {tags} tags is over the limit of {wire.MAX_ASKED}")
    return reader.packed(KEY_BYTES, keys), reader.blobs(TAG_BYTES, tags)


def pack_answers(answers: Sequence[Answer], count: int) -> bytes:
    return b"".join(wire.bitset(part, count) for answer in answers for part in (answer.hit, answer.pending, answer.retry))


def unpack_answers(reader: Reader, tags: Sequence[bytes], count: int) -> dict[bytes, Answer]:
    raw, size = reader.rest(), (count + 7) // 8
    if len(raw) != 3 * size * len(tags):
        raise WireError(f"an answer about {count} keys and {len(tags)} tags has {len(raw)} bytes")
    found = {}
    for at, tag in zip(range(0, len(raw), 3 * size), tags, strict=True) if size else ((0, tag) for tag in tags):
        hit, pending, retry = (int.from_bytes(raw[begin : begin + size], "little") for begin in (at, at + size, at + 2 * size))
        if (hit | pending | retry) >> count:
            raise WireError(f"an answer speaks of more than the {count} keys that there are")
        found[tag] = Answer(hit, pending, retry)
    return found


def joined(known: Answer, more: Answer, at: int) -> Answer:
    """What is known of the keys before ``at``, and the answer for those from there on."""
    return Answer(known.hit | more.hit << at, known.pending | more.pending << at, known.retry | more.retry << at)


def pack_reserve(ids: Ids, lengths: Sequence[int] | U64, seconds: float) -> bytes:
    return b"".join((wire.packed_ids(ids), np.asarray(lengths, "<u8").tobytes(), wire.real(seconds)))


def unpack_reserve(reader: Reader) -> tuple[Ids, U64, float]:
    """((n, 64) uint8 ids, (n,) lengths, seconds)."""
    ids = reader.few_ids()
    return ids, reader.words(len(ids)), seconds(reader)


def pack_reservation(reservation: Reservation) -> bytes:
    return b"".join((_CLAIM.pack(reservation.id, reservation.seconds), reservation.outcomes.tobytes(), reservation.offsets.tobytes()))


def unpack_reservation(reader: Reader, count: int) -> Reservation:
    id, seconds = reader.number("Q"), reader.real()
    outcomes = np.frombuffer(reader.take(count), np.uint8)
    if outcomes.max(initial=0) >= len(OUTCOMES):
        raise WireError("unknown outcome of a reservation")
    offsets = reader.words(count)
    reader.end()
    return Reservation(id, seconds, outcomes, offsets)


def pack_seal(reservation: int, checksums: Sequence[int | None] | Sums) -> bytes:
    sums = checksums if isinstance(checksums, Sums) else Sums.of(checksums)
    head = wire.number(reservation, "Q") + wire.number(len(sums))
    return b"".join((head, wire.flags(sums.done), sums.values.tobytes()))


def unpack_seal(reader: Reader) -> tuple[int, Sums]:
    reservation, count = reader.number("Q"), reader.count()
    done = reader.flags(count)
    sums = Sums(done, reader.words(count))
    reader.end()
    return reservation, sums


def pack_lease(lease: Lease) -> bytes:
    return b"".join((_CLAIM.pack(lease.id, lease.seconds), wire.flags(lease.hit), lease.table.tobytes()))


def unpack_lease(reader: Reader, count: int) -> Lease:
    id, seconds, hit = reader.number("Q"), reader.real(), reader.flags(count)
    table = reader.words(4 * int(hit.sum())).reshape(-1, 4)
    reader.end()
    return Lease(id, seconds, hit, table)


def pack_record(digest: bytes, record: Mapping[str, str]) -> bytes:
    """Raises StoreError."""
    if len(digest) > _MOST_DIGEST:
        raise StoreError(f"a digest of {len(digest)} bytes; at most {_MOST_DIGEST} are kept")
    return wire.number(len(digest), "H") + digest + json.dumps(dict(record)).encode()


def unpack_record(reader: Reader) -> tuple[bytes, dict[str, str]]:
    return reader.take(reader.number("H")), record_of(reader.rest())


def record_of(raw: bytes) -> dict[str, str]:
    """A JSON object of strings. Raises WireError."""
    return _record(_object(raw, "a record"))


def unpack_records(reader: Reader) -> dict[bytes, dict[str, str]]:
    """Records by digest."""
    records = _object(reader.rest(), "the answer with the records")
    try:
        return {bytes.fromhex(digest): _record(record) for digest, record in records.items()}
    except ValueError as error:
        raise WireError(f"a digest of a record is not in hex: {error}") from error


def unpack_stats(reader: Reader) -> StoreStats:
    """Counters; those that this version does not know are left out, those that the other does not are what they are at first."""
    found = _object(reader.rest(), "the answer with the counters")
    stats = {field.name: found[field.name] for field in fields(StoreStats) if field.name in found}
    for name, value in stats.items():
        if not isinstance(value, _COUNTERS.get(name, int)) or (isinstance(value, dict) and not _are_usages(value)):
            raise WireError(f"the counter {name} of a store is {value!r}")
    try:
        return StoreStats(**stats)
    except TypeError as error:
        raise WireError(f"counters of a store are missing: {error}") from error


def _are_usages(value: Mapping[str, object]) -> bool:
    return all(isinstance(usage, dict) and all(isinstance(count, int) for count in usage.values()) for usage in value.values())


def _record(value: object) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise WireError("a record must be an object whose values are strings")
    return value


def _object(raw: bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise WireError(f"{what} is not JSON") from error
    if not isinstance(value, dict):
        raise WireError(f"{what} must be a JSON object")
    return value


def seconds(reader: Reader) -> float:
    """A duration that a peer names. NaN and negative numbers are not durations."""
    return require_seconds(reader.real())


def require_seconds(value: float) -> float:
    """Raises WireError."""
    if not 0.0 <= value < float("inf"):
        raise WireError(f"{value} is not a number of seconds")
    return value


def text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")
