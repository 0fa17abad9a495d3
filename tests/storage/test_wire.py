"""Frames and bodies: what is packed is unpacked equal; anything else is refused and nothing large is allocated for it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_ray.storage import bits, messages, wire
from hicache_ray.storage.descriptors import Grant, Lease, Loan, Outcome, Reservation, Sums
from hicache_ray.storage.messages import Hello
from hicache_ray.storage.table import packed, unpacked
from hicache_ray.storage.wire import HEADER, MAGIC, MAX_BODY, REPLY, VERSION, Frame, Kind, Reader, Splitter, WireError
from hicache_ray.store import KEY_BYTES, TAG_BYTES, Answer, StoreStats

U64 = st.integers(0, 2**64 - 1)
SECONDS = st.floats(0, 1e6)


def ids(size: int) -> st.SearchStrategy[list[bytes]]:
    return st.lists(st.binary(min_size=size, max_size=size), max_size=9)


@given(st.lists(st.tuples(st.sampled_from(Kind), st.integers(0, 2**32 - 1), st.binary(max_size=99)), max_size=5), st.integers(1, 50))
def test_a_stream_is_cut_into_its_frames(frames: list[tuple[Kind, int, bytes]], step: int) -> None:
    stream = b"".join(wire.encode(kind | REPLY, request, body) for kind, request, body in frames)
    splitter, found = Splitter(REPLY), []
    for start in range(0, len(stream), step):
        splitter.feed(stream[start : start + step])
        while (frame := splitter.next()) is not None:
            found.append(frame)
    assert found == [Frame(*frame) for frame in frames]
    assert not splitter


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (HEADER.pack(b"GE", VERSION, Kind.PING, 1, 0), "not a frame"),
        (HEADER.pack(MAGIC, VERSION + 1, Kind.PING, 1, 0), "not a frame of protocol version"),
        (HEADER.pack(MAGIC, VERSION, 99, 1, 0), "unknown kind"),
        (HEADER.pack(MAGIC, VERSION, Kind.PING | REPLY, 1, 0), "unknown kind"),
        (HEADER.pack(MAGIC, VERSION, Kind.PING, 1, MAX_BODY + 1), "over the limit"),
    ],
)
def test_what_is_not_a_frame_is_refused_by_its_header(header: bytes, says: str) -> None:
    splitter = Splitter(0)
    splitter.feed(header)
    with pytest.raises(WireError, match=says):
        splitter.next()


def test_too_large_a_frame_is_not_sent() -> None:
    with pytest.raises(WireError, match="over the limit"):
        wire.encode(Kind.PING, 1, bytes(MAX_BODY + 1))


@given(st.binary(max_size=300))
def test_random_bytes_never_do_more_than_raise(raw: bytes) -> None:
    splitter = Splitter(0)
    splitter.feed(MAGIC + raw)
    for work in (splitter.next, *[lambda u=unpack: u(Reader(raw)) for unpack in UNPACK]):  # type: ignore[misc]
        with contextlib.suppress(WireError):
            work()


UNPACK: list[Callable[[Reader], object]] = [
    messages.unpack_hello,
    messages.unpack_lookup,
    messages.unpack_reserve,
    messages.unpack_seal,
    messages.unpack_record,
    messages.unpack_records,
    messages.unpack_stats,
    messages.seconds,
    Reader.ids,
    lambda reader: messages.unpack_reservation(reader, 3),
    lambda reader: messages.unpack_lease(reader, 3),
    lambda reader: messages.unpack_answers(reader, [b"a", b"b"], 9),
]


@pytest.mark.parametrize("unpack", [messages.unpack_lookup, messages.unpack_reserve, Reader.ids])
def test_an_announced_count_allocates_nothing(unpack: Callable[[Reader], object]) -> None:
    with pytest.raises(WireError, match="limit"):
        unpack(Reader(wire.number(2**32 - 1) * 3))
    with pytest.raises(WireError, match="announced"):
        unpack(Reader(wire.number(9) * 3))


def test_hello() -> None:
    hello = Hello("00ff" * 4, [("/dev/shm/größe/segment-0", 2**40)])
    assert messages.unpack_hello(Reader(messages.pack_hello(hello))) == hello


@given(ids(KEY_BYTES), ids(TAG_BYTES))
def test_lookup(keys: list[bytes], tags: list[bytes]) -> None:
    found, asked = messages.unpack_lookup(Reader(messages.pack_lookup(keys, tags)))
    assert (unpacked(found), asked) == (keys, tags)


def test_a_lookup_bounds_the_work_of_the_service() -> None:
    with pytest.raises(WireError, match="over the limit"):
        messages.unpack_lookup(Reader(wire.number(16384) + wire.number(17)))


@given(st.lists(st.tuples(*[st.integers(0, 2**13 - 1)] * 3), max_size=4))
def test_answers(parts: list[tuple[int, int, int]]) -> None:
    answers = [Answer(hit, pending, retry) for hit, pending, retry in parts]
    tags = [bytes([i]) * TAG_BYTES for i in range(len(parts))]
    body = Reader(messages.pack_answers(answers, 13))
    assert list(messages.unpack_answers(body, tags, 13).values()) == answers
    body.end()


@given(ids(KEY_BYTES + TAG_BYTES), st.data(), SECONDS)
def test_reserve(names: list[bytes], data: st.DataObject, seconds: float) -> None:
    lengths = data.draw(st.lists(U64, min_size=len(names), max_size=len(names)))
    for form in (names, packed(names)):
        found, sizes, time = messages.unpack_reserve(Reader(messages.pack_reserve(form, lengths, seconds)))
        assert (unpacked(packed(found)), sizes.tolist(), time) == (names, lengths, seconds)


@given(U64, SECONDS, st.lists(st.builds(Grant, st.sampled_from(Outcome), U64), max_size=9))
def test_reservation(id: int, seconds: float, grants: list[Grant]) -> None:
    outcomes, offsets = np.array([g.outcome for g in grants], np.uint8), np.array([g.offset for g in grants], np.uint64)
    found = messages.unpack_reservation(Reader(messages.pack_reservation(Reservation(id, seconds, outcomes, offsets))), len(grants))
    assert (found.id, found.seconds, found.grants) == (id, seconds, grants)
    assert found.granted.tolist() == [i for i, grant in enumerate(grants) if grant.outcome is Outcome.GRANTED]


@given(U64, st.lists(st.none() | U64, max_size=20))
def test_seal(id: int, checksums: list[int | None]) -> None:
    for form in (checksums, Sums.of(checksums)):
        found, sums = messages.unpack_seal(Reader(messages.pack_seal(id, form)))
        assert (found, sums.listed()) == (id, checksums)


@given(U64, SECONDS, st.lists(st.none() | st.builds(Loan, U64, U64, U64, U64), max_size=20))
def test_lease(id: int, seconds: float, loans: list[Loan | None]) -> None:
    hit = np.array([loan is not None for loan in loans], np.bool_)
    lease = Lease(id, seconds, hit, np.array([loan for loan in loans if loan is not None], np.uint64).reshape(-1, 4))
    found = messages.unpack_lease(Reader(messages.pack_lease(lease)), len(loans))
    assert (found.id, found.seconds, found.loans) == (id, seconds, loans)
    columns = zip(found.offsets.tolist(), found.lengths.tolist(), found.checksums.tolist(), found.generations.tolist(), strict=True)
    assert [loans[i] for i in found.which.tolist()] == [Loan(*column) for column in columns]


@given(st.binary(max_size=64), st.dictionaries(st.text(max_size=9), st.text(max_size=9)))
def test_record(digest: bytes, record: dict[str, str]) -> None:
    assert messages.unpack_record(Reader(messages.pack_record(digest, record))) == (digest, record)


@pytest.mark.parametrize("raw", [b"", b"[1]", b'{"a": 1}', b"\xff", b"[" * 100_000, json.dumps({"a": {}}).encode()])
def test_what_is_not_a_record(raw: bytes) -> None:
    with pytest.raises(WireError, match="record"):
        messages.record_of(raw)


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b'{"zz": {}}', b'{"00": []}', b'{"00": {"a": 1}}', b"{" * 100_000, b'{"capacity_bytes": 1', b"\xff"]
)
def test_what_are_no_records_and_no_counters(raw: bytes) -> None:
    with pytest.raises(WireError):
        messages.unpack_records(Reader(raw))
    with pytest.raises(WireError):
        messages.unpack_stats(Reader(raw))


def test_counters() -> None:
    stats = StoreStats(1, 2, 3, tenants={"ann": {"bytes": 4}}, writes_off="full")
    body = asdict(stats)
    assert messages.unpack_stats(Reader(json.dumps({**body, "of another version": [1]}).encode())) == stats
    for name, value in {"puts": "1", "tenants": [], "used_bytes": None, "writes_off": 1, "leases": 1.5}.items():
        with pytest.raises(WireError, match=f"counter {name} of a store is"):
            messages.unpack_stats(Reader(json.dumps({**body, name: value}).encode()))
    with pytest.raises(WireError, match="counter tenants"):
        messages.unpack_stats(Reader(json.dumps({**body, "tenants": {"ann": {"bytes": "4"}}}).encode()))


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0])
def test_what_is_not_a_duration(seconds: float) -> None:
    with pytest.raises(WireError, match="not a number of seconds"):
        messages.seconds(Reader(wire.real(seconds)))


@given(st.lists(st.booleans(), max_size=200))
def test_bitsets(flags: list[bool]) -> None:
    value = bits.pack(flags)
    assert value == sum(1 << i for i, flag in enumerate(flags) if flag) == bits.packed(np.array(flags, np.bool_))
    assert list(bits.each(value)) == [i for i, flag in enumerate(flags) if flag]
    assert bits.unpacked(value | 1 << len(flags), len(flags)).tolist() == flags
    assert Reader(wire.bitset(value, len(flags))).bits(len(flags)) == value
    assert Reader(wire.flags(np.array(flags, np.bool_))).flags(len(flags)).tolist() == flags
