"""Frames between the arena's clients and its service: fixed binary layouts, every length bounded, nothing executable.

    frame   magic 2s | version u8 | kind u8 | request u32 | body length u32 | body          little endian, no padding

A reply repeats the request number and sets the high bit of the kind. RELEASE has no reply. Counts come before what they count.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hicache_ray.errors import StoreError
from hicache_ray.storage.ids import ID_BYTES

MAGIC, VERSION = b"hR", 3
HEADER = struct.Struct("<2sBBII")
MAX_BODY = 4 << 20  # bytes
MAX_IDS = 16384  # ids, or keys, of one frame
MAX_ASKED = 1 << 18  # keys x tags of one lookup: bounds how long the service works on one frame
MAX_RECORDS = 1 << 20  # bytes of all described records together
REPLY = 0x80


class WireError(StoreError):
    """Bytes that are not a frame of this protocol. The connection is of no more use."""


class Kind(enum.IntEnum):
    HELLO = 1
    LOOKUP = 2
    RESERVE = 3
    SEAL = 4
    LEASE = 5
    RELEASE = 6
    DROP = 7
    CLEAR = 8
    SCAN = 9
    DESCRIBE = 10
    DESCRIBED = 11
    STATS = 12
    PING = 13
    MEMBERS = 14
    WRITE = 15
    ERROR = 127


_SCALARS = {code: struct.Struct("<" + code) for code in "BHIQd"}
KINDS = frozenset(int(kind) for kind in Kind)


class Frame(NamedTuple):
    kind: int
    request: int
    body: bytes


def encode(kind: int, request: int, body: bytes) -> bytes:
    if len(body) > MAX_BODY:
        raise WireError(f"a frame of {len(body)} bytes is over the limit of {MAX_BODY}")
    return HEADER.pack(MAGIC, VERSION, kind, request, len(body)) + body


class Splitter:
    """Cuts a byte stream into frames. Holds at most one frame and one read more than that."""

    def __init__(self, flag: int) -> None:
        """``flag``: REPLY where replies are expected, 0 where requests are. Frames come out without it."""
        self._pending: bytes | bytearray = b""
        self._flag = flag

    def feed(self, data: bytes) -> None:
        if not self._pending:
            self._pending = data  # nearly always: one read is one frame
        elif isinstance(self._pending, bytearray):
            self._pending += data
        else:
            self._pending = bytearray(self._pending) + data

    def taken(self, data: memoryview, count: int) -> Frame | None:
        """The first ``count`` bytes of ``data``, where they are one good frame and no more, and none is begun: nearly always. Else None:
        they are fed."""
        if not self._pending and count >= HEADER.size:
            magic, version, kind, request, length = HEADER.unpack_from(data)
            kind ^= self._flag
            if HEADER.size + length == count and magic == MAGIC and version == VERSION and kind in KINDS:
                return Frame(kind, request, bytes(data[HEADER.size : count]))
        self.feed(bytes(data[:count]))
        return None

    def __bool__(self) -> bool:
        """Is a frame begun?"""
        return bool(self._pending)

    def next(self) -> Frame | None:
        """The next whole frame, or None. Raises WireError."""
        if len(self._pending) < HEADER.size:
            return None
        magic, version, kind, request, length = HEADER.unpack_from(self._pending)
        if magic != MAGIC or version != VERSION:
            raise WireError(f"not a frame of protocol version {VERSION}: it starts with {bytes(self._pending[:3])!r}")
        kind ^= self._flag
        if kind not in KINDS:
            raise WireError(f"unknown kind of frame {kind}")
        if length > MAX_BODY:
            raise WireError(f"a frame of {length} bytes is over the limit of {MAX_BODY}")
        end = HEADER.size + length
        if len(self._pending) < end:
            return None
        body = bytes(self._pending[HEADER.size : end])
        self._pending = self._pending[end:] if end < len(self._pending) else b""
        return Frame(kind, request, body)


def only(body: bytes, layout: struct.Struct) -> tuple[Any, ...]:
    """The whole of a body. Raises WireError."""
    if layout.size != len(body):
        raise WireError(f"a frame has {len(body)} bytes where it should have {layout.size}")
    return layout.unpack(body)


class Reader:
    """Walks a body; every read is checked against its end. Raises WireError."""

    def __init__(self, body: bytes) -> None:
        self._body, self._at = body, 0

    def take(self, count: int) -> bytes:
        end = self._at + count
        if count < 0 or end > len(self._body):
            raise WireError(f"a frame ends after {len(self._body)} bytes where {end} were announced")
        part, self._at = self._body[self._at : end], end
        return part

    def number(self, code: str = "I") -> int:
        """One little-endian integer of struct code ``B H I Q``."""
        return self._one(_SCALARS[code])

    def real(self) -> float:
        return self._one(_SCALARS["d"])

    def numbers(self, code: str, count: int) -> list[int]:
        return list(self._unpack(code, count))

    def count(self, limit: int = MAX_IDS) -> int:
        value = self.number()
        if value > limit:
            raise WireError(f"a frame names {value} items; the limit is {limit}")
        return value

    def blobs(self, size: int, count: int) -> list[bytes]:
        raw = self.take(size * count)
        return [raw[i : i + size] for i in range(0, len(raw), size)]

    def ids(self) -> list[bytes]:
        return self.blobs(ID_BYTES, self.count())

    def packed(self, size: int, count: int) -> npt.NDArray[np.uint8]:
        """(count, size) uint8, without a copy."""
        return np.frombuffer(self.take(size * count), np.uint8).reshape(count, size)

    def few_ids(self) -> npt.NDArray[np.uint8] | list[bytes]:
        """:meth:`packed_ids`, but one alone as bytes: it costs less than the array."""
        count = self.count()
        return [self.take(ID_BYTES)] if count == 1 else self.packed(ID_BYTES, count)

    def packed_ids(self) -> npt.NDArray[np.uint8]:
        return self.packed(ID_BYTES, self.count())

    def words(self, count: int) -> npt.NDArray[np.uint64]:
        return np.frombuffer(self.take(8 * count), "<u8")

    def flags(self, count: int) -> npt.NDArray[np.bool_]:
        """A bitset as an array."""
        raw = np.frombuffer(self.take((count + 7) // 8), np.uint8)
        return np.unpackbits(raw, count=count, bitorder="little").view(np.bool_)

    def bits(self, count: int) -> int:
        value = int.from_bytes(self.take((count + 7) // 8), "little")
        if value >> count:
            raise WireError(f"a bitset speaks of more than the {count} items that there are")
        return value

    def all_bits(self, count: int) -> int:
        """:meth:`bits`, and the body ends there."""
        value = self.bits(count)
        self.end()
        return value

    def last_number(self, code: str = "I") -> int:
        """:meth:`number`, and the body ends there."""
        value = self.number(code)
        self.end()
        return value

    @property
    def size(self) -> int:
        """Of the whole body, in bytes."""
        return len(self._body)

    def only(self, layout: struct.Struct) -> tuple[Any, ...]:
        """The whole body."""
        return only(self._body, layout)

    def rest(self) -> bytes:
        return self.take(len(self._body) - self._at)

    def end(self) -> None:
        if self._at != len(self._body):
            raise WireError(f"a frame has {len(self._body) - self._at} bytes too many")

    def _one(self, layout: struct.Struct) -> Any:
        at, self._at = self._at, self._at + layout.size
        if self._at > len(self._body):
            raise WireError(f"a frame ends after {len(self._body)} bytes where {self._at} were announced")
        return layout.unpack_from(self._body, at)[0]

    def _unpack(self, code: str, count: int) -> tuple[Any, ...]:
        layout = f"<{count}{code}"
        return struct.unpack(layout, self.take(struct.calcsize(layout)))


def number(value: int, code: str = "I") -> bytes:
    return _SCALARS[code].pack(value)


def real(value: float) -> bytes:
    return _SCALARS["d"].pack(value)


def numbers(code: str, values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}{code}", *values)


def bitset(value: int, count: int) -> bytes:
    return value.to_bytes((count + 7) // 8, "little")


def ids(values: Sequence[bytes]) -> bytes:
    return number(len(values)) + b"".join(values)


def packed_ids(values: Sequence[bytes] | npt.NDArray[np.uint8]) -> bytes:
    """The same for ids that may be an (n, 64) array."""
    return number(len(values)) + (values.tobytes() if isinstance(values, np.ndarray) else b"".join(values))


def flags(values: npt.NDArray[np.bool_]) -> bytes:
    """A bitset of whole bytes."""
    return np.packbits(values, bitorder="little").tobytes()
