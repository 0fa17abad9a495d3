"""Bodies of the messages that carry more than ids: what is packed on one side is unpacked here for the other.

    HELLO    > nothing                          < incarnation 8s | segments u16 | (data bytes u64 | path length u16 | path)*
    LOOKUP   > keys u32 | tags u32 | keys | tags                  < (hit bits | pending bits) per tag
    RESERVE  > ids | lengths u64* | seconds f64                   < reservation u64 | seconds f64 | outcomes u8* | offsets u64*
    SEAL     > reservation u64 | count u32 | done bits | checksums u64*                    < sealed bits
    LEASE    > ids | seconds f64       < lease u64 | seconds f64 | hit bits | (offset | length | checksum | generation: u64 each)*
    RELEASE  > lease u64 | count u32 | bad bits                   no reply
    DROP     > ids                                                < bits of those that existed
    SCAN     > cursor u32 | prefix length u16 | prefix            < next cursor u32 (0: the end) | ids
    DESCRIBE > digest length u16 | digest | JSON object           < nothing
    CLEAR    > prefix length u16 | prefix                         < count u64
    DESCRIBED < JSON object     STATS < JSON object     PING < what was sent     ERROR < text

Bits are bitsets of whole bytes; a star repeats what is before it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hicache_ray.storage import bits, wire
from hicache_ray.storage.descriptors import Grant, Lease, Loan, Outcome, Reservation
from hicache_ray.storage.wire import Reader, WireError
from hicache_ray.store import KEY_BYTES, TAG_BYTES, Answer

OUTCOMES = tuple(Outcome)  # by value; calling the enum costs more than all else in its message


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
    if len(segments) != 1:
        raise WireError(f"this client maps one segment, the service names {len(segments)}")
    return Hello(incarnation, segments)


def pack_lookup(keys: Sequence[bytes], tags: Sequence[bytes]) -> bytes:
    return b"".join((wire.number(len(keys)), wire.number(len(tags)), *keys, *tags))


def unpack_lookup(reader: Reader) -> tuple[list[bytes], list[bytes]]:
    keys, tags = reader.count(), reader.count(wire.MAX_ASKED)
    if keys * tags > wire.MAX_ASKED:
        raise WireError(f"a lookup of {keys} keys under {tags} tags is over the limit of {wire.MAX_ASKED}")
    return reader.blobs(KEY_BYTES, keys), reader.blobs(TAG_BYTES, tags)


def pack_answers(answers: Sequence[Answer], count: int) -> bytes:
    return b"".join(wire.bitset(part, count) for answer in answers for part in (answer.hit, answer.pending))


def unpack_answers(reader: Reader, tags: Sequence[bytes], count: int) -> dict[bytes, Answer]:
    return {tag: Answer(hit=reader.bits(count), pending=reader.bits(count)) for tag in tags}


def pack_reserve(ids: Sequence[bytes], lengths: Sequence[int], seconds: float) -> bytes:
    return wire.ids(ids) + wire.numbers("Q", lengths) + wire.real(seconds)


def unpack_reserve(reader: Reader) -> tuple[list[bytes], list[int], float]:
    ids = reader.ids()
    return ids, reader.numbers("Q", len(ids)), seconds(reader)


def pack_reservation(reservation: Reservation) -> bytes:
    outcomes = bytes(grant.outcome for grant in reservation.grants)
    offsets = wire.numbers("Q", [grant.offset for grant in reservation.grants])
    return wire.number(reservation.id, "Q") + wire.real(reservation.seconds) + outcomes + offsets


def unpack_reservation(reader: Reader, count: int) -> Reservation:
    id, seconds = reader.number("Q"), reader.real()
    try:
        outcomes = [OUTCOMES[code] for code in reader.take(count)]
    except IndexError as error:
        raise WireError("unknown outcome of a reservation") from error
    return Reservation(id, seconds, list(map(Grant, outcomes, reader.numbers("Q", count))))


def pack_seal(reservation: int, checksums: Sequence[int | None]) -> bytes:
    count, done = len(checksums), bits.pack(checksum is not None for checksum in checksums)
    body = wire.number(reservation, "Q") + wire.number(count) + wire.bitset(done, count)
    return body + wire.numbers("Q", [checksum or 0 for checksum in checksums])


def unpack_seal(reader: Reader) -> tuple[int, list[int | None]]:
    reservation, count = reader.number("Q"), reader.count()
    done = reader.bits(count)
    return reservation, [checksum if done >> i & 1 else None for i, checksum in enumerate(reader.numbers("Q", count))]


def pack_lease(lease: Lease) -> bytes:
    hit = bits.pack(loan is not None for loan in lease.loans)
    fields = [value for loan in lease.loans if loan is not None for value in loan]
    return wire.number(lease.id, "Q") + wire.real(lease.seconds) + wire.bitset(hit, len(lease.loans)) + wire.numbers("Q", fields)


def unpack_lease(reader: Reader, count: int) -> Lease:
    id, seconds, hit = reader.number("Q"), reader.real(), reader.bits(count)
    fields = iter(reader.numbers("Q", 4 * hit.bit_count()))
    loans = map(Loan, fields, fields, fields, fields)
    return Lease(id, seconds, [next(loans) if hit >> i & 1 else None for i in range(count)])


def pack_record(digest: bytes, record: Mapping[str, str]) -> bytes:
    return wire.number(len(digest), "H") + digest + json.dumps(dict(record)).encode()


def unpack_record(reader: Reader) -> tuple[bytes, dict[str, str]]:
    return reader.take(reader.number("H")), record_of(reader.rest())


def record_of(raw: bytes) -> dict[str, str]:
    """A JSON object of strings. Raises WireError."""
    try:
        record = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise WireError("a record is not JSON") from error
    if not isinstance(record, dict) or not all(isinstance(value, str) for value in record.values()):
        raise WireError("a record must be an object whose values are strings")
    return record


def seconds(reader: Reader) -> float:
    """A duration that a client asks for. NaN and negative numbers are not durations."""
    value = reader.real()
    if not 0.0 <= value < float("inf"):
        raise WireError(f"{value} is not a number of seconds")
    return value


def text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")
