"""What lies in a segment file. Numbers are little-endian; every part has an xxh3-64 checksum over what precedes it.

    [0, 4096)               superblock: magic, version, uid, slot size, number of slots; written once
    [4096, 8192)            footer pointer: length and checksum of the footer, or zeros where there is none
    [8192, data)            one record of 128 bytes per slot, zeros where the slot is free
    [data, footer)          the slots: objects, each from the start of its slot, zeros after it
    [footer, end)           the footer, an Arrow table, in room for every slot of it

Records lie together, so that slots are aligned, neighbours are read in one go, and a start reads one short range per segment. A record is
written after its object's bytes and zeroed before a slot is given to another: a record that fits says that the bytes are there.
Records do not straddle sectors, so a write that is torn between sectors leaves each record as it was or as it should be.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from hicache_ray.storage.disk_io import BLOCK, up
from hicache_ray.storage.slabs import slot_bytes as size_class

VERSION = 1
POINTER_OFFSET = BLOCK
RECORDS_OFFSET = 2 * BLOCK
RECORD_BYTES = 128
MAX_SLOTS = 1 << 24  # per segment
_MAGIC = b"hicache\x01"
_RECORD_MAGIC = 0x4F434948  # "HICO"
_FOOTER_ROW, _FOOTER_BASE = 112, 4096  # bytes, generous: a footer that does not fit is not written

#: A record as numpy sees it; ``pack_record`` makes the same bytes.
RECORD = np.dtype(
    [
        ("magic", "<u4"), ("version", "<u4"), ("length", "<u8"), ("checksum", "<u8"), ("sequence", "<u8"), ("segment", "<u8"),
        ("slot", "<u4"), ("reserved", "<u4"), ("id", "u1", (64,)), ("spare", "<u8"), ("check", "<u8"),
    ]
)  # fmt: skip
_RECORD = struct.Struct("<IIQQQQII64sQ")
_SUPER = struct.Struct("<8sIIQQQ")
_POINTER = struct.Struct("<8sQQQ")
_CHECK = struct.Struct("<Q")
Records = npt.NDArray[np.void]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Geometry:
    """``slots`` slots of ``slot_bytes`` (a multiple of BLOCK), and where the parts of the file begin. All in bytes."""

    slot_bytes: int
    slots: int

    @property
    def data(self) -> int:
        return RECORDS_OFFSET + up(self.slots * RECORD_BYTES)

    @property
    def footer(self) -> int:
        return self.data + self.slots * self.slot_bytes

    @property
    def footer_room(self) -> int:
        return up(_FOOTER_BASE + _FOOTER_ROW * self.slots)

    @property
    def file_bytes(self) -> int:
        return self.footer + self.footer_room

    @property
    def disk_bytes(self) -> int:
        """What the file may take: beside its bytes, blocks of the file system's own that map them (340 extents in one; half are full)."""
        return self.file_bytes + BLOCK * (2 + (self.slots + self.slots // (BLOCK // RECORD_BYTES)) // 170)

    def at(self, slot: int) -> int:
        """Where a slot begins."""
        return self.data + slot * self.slot_bytes


def slot_size(length: int) -> int:
    """Size class of an object: less than 6 % more than its length from 64 KiB on."""
    return up(max(size_class(length), 1))


def geometry(slot_bytes: int, segment_bytes: int, room: int) -> Geometry | None:
    """A segment of about ``segment_bytes`` of data that fits into ``room``; None where less than half of it would."""
    most = min(segment_bytes // slot_bytes, MAX_SLOTS)
    slots = min(most, max(room - RECORDS_OFFSET - _FOOTER_BASE, 0) // (slot_bytes + RECORD_BYTES + _FOOTER_ROW))
    while slots and Geometry(slot_bytes, slots).disk_bytes > room:
        slots -= 1
    return Geometry(slot_bytes, slots) if slots and slots * 2 >= most else None


def pack_record(id: bytes, length: int, checksum: int, sequence: int, segment: int, slot: int) -> bytes:
    body = _RECORD.pack(_RECORD_MAGIC, VERSION, length, checksum, sequence, segment, slot, 0, id, 0)
    return body + _CHECK.pack(xxhash.xxh3_64_intdigest(body))


def whole_records(records: Records, segment: int, slot_bytes: int) -> npt.NDArray[np.bool_]:
    """Which records fit their checksum and belong where they lie."""
    fits = (records["magic"] == _RECORD_MAGIC) & (records["version"] == VERSION) & (records["segment"] == segment)
    fits &= (records["slot"] == np.arange(len(records))) & (records["length"] <= slot_bytes)
    raw = records.view(np.uint8).reshape(-1).data
    checks, body = records["check"], _RECORD.size
    for slot in np.flatnonzero(fits).tolist():
        start = slot * RECORD_BYTES
        fits[slot] = xxhash.xxh3_64_intdigest(raw[start : start + body]) == checks[slot]
    found: npt.NDArray[np.bool_] = fits
    return found


def fill_record_constants(records: Records, slots: Ints, segment: int) -> None:
    """The fields of a record that a footer does not repeat."""
    records["magic"][slots], records["version"][slots], records["segment"][slots] = _RECORD_MAGIC, VERSION, segment
    records["slot"][slots] = slots


def pack_super(uid: int, shape: Geometry) -> bytes:
    return _block(_SUPER.pack(_MAGIC, VERSION, 0, uid, shape.slot_bytes, shape.slots))


def unpack_super(block: memoryview) -> tuple[int, Geometry] | None:
    """(uid, geometry), None where the block is not whole or of another version."""
    found = _unpack(_SUPER, block)
    if found is None or found[1] != VERSION:
        return None
    shape = Geometry(found[4], found[5])
    return (found[3], shape) if shape.slot_bytes > 0 and shape.slot_bytes % BLOCK == 0 and 0 < shape.slots <= MAX_SLOTS else None


def pack_pointer(uid: int, length: int, checksum: int) -> bytes:
    return _block(_POINTER.pack(_MAGIC, uid, length, checksum))


def unpack_pointer(block: memoryview, uid: int) -> tuple[int, int] | None:
    """(length, checksum) of the footer; None where there is none."""
    found = _unpack(_POINTER, block)
    return (found[2], found[3]) if found is not None and found[1] == uid else None


def _block(body: bytes) -> bytes:
    return (body + _CHECK.pack(xxhash.xxh3_64_intdigest(body))).ljust(BLOCK, b"\0")


def _unpack(form: struct.Struct, block: memoryview) -> tuple[int, ...] | None:
    (check,) = _CHECK.unpack_from(block, form.size)
    fields = form.unpack_from(block)
    return fields if fields[0] == _MAGIC and check == xxhash.xxh3_64_intdigest(block[: form.size]) else None
