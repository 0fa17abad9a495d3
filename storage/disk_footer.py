"""Arrow tables on disk: the footer of a segment, and the export of a whole store. Any Arrow tool reads them; nothing is unpickled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hicache_ray.errors import StoreError
from hicache_ray.storage.disk_format import Ints, Records, fill_record_constants
from hicache_ray.storage.ids import ID_BYTES
from hicache_ray.store import DIGEST_BYTES, GROUP_BYTES, SPACE_BYTES, TAG_BYTES

FOOTER = pa.schema(
    [
        ("id", pa.binary(ID_BYTES)), ("length", pa.uint64()), ("checksum", pa.uint64()), ("sequence", pa.uint64()),
        ("used", pa.uint64()), ("check", pa.uint64()), ("slot", pa.uint32()),
    ]
)  # fmt: skip
_PARTS = (("space", SPACE_BYTES), ("group", GROUP_BYTES), ("digest", DIGEST_BYTES), ("tag", TAG_BYTES))


@dataclass(frozen=True)
class Listing:
    """The objects of one segment, in the order of their slots. ``used``: when each was last used, on the store's count of uses."""

    segment: int
    offsets: Ints
    slots: Ints
    used: Ints
    records: Records


def pack_footer(listing: Listing) -> pa.Buffer:
    rows = listing.records
    columns = [
        _binary(rows["id"]), rows["length"], rows["checksum"], rows["sequence"], listing.used.astype(np.uint64), rows["check"],
        listing.slots.astype(np.uint32),
    ]  # fmt: skip
    batch = pa.record_batch([c if isinstance(c, pa.Array) else pa.array(np.ascontiguousarray(c)) for c in columns], schema=FOOTER)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, FOOTER) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def unpack_footer(data: memoryview, records: Records, used: Ints, segment: int) -> Ints | None:
    """Fill ``records`` and ``used`` at the slots that the footer names, and return these. None where it is not such a footer."""
    try:
        batch = pa.ipc.open_file(pa.py_buffer(data)).read_all().combine_chunks()
    except (pa.ArrowException, OSError):
        return None
    if batch.schema != FOOTER:
        return None
    slots = batch["slot"].to_numpy().astype(np.int64)
    if slots.size and int(slots.max()) >= len(records):
        return None
    ids = batch["id"].combine_chunks()
    if slots.size:
        raw = np.frombuffer(ids.buffers()[1], np.uint8)[ids.offset * ID_BYTES :][: slots.size * ID_BYTES]
        records["id"][slots] = raw.reshape(-1, ID_BYTES)
    for name in ("length", "checksum", "sequence", "check"):
        records[name][slots] = batch[name].to_numpy()
    fill_record_constants(records, slots, segment)
    used[slots] = batch["used"].to_numpy()
    return slots


def export(path: str | Path, listings: Sequence[Listing]) -> int:
    """Write what a store holds as one Arrow IPC file, a record batch per segment; returns the number of rows. Raises StoreError."""
    parts = [(name, pa.binary(size)) for name, size in _PARTS]
    numbers = [(name, pa.uint64()) for name in ("length", "checksum", "sequence", "used", "segment", "slot", "offset")]
    schema = pa.schema(parts + numbers)
    try:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            for listing in listings:
                writer.write_batch(pa.record_batch(_columns(listing), schema=schema))
    except (OSError, pa.ArrowException) as error:
        raise StoreError(f"cannot export to {path}: {error}") from error
    return sum(len(listing.slots) for listing in listings)


def _columns(listing: Listing) -> list[pa.Array]:
    rows, start, out = listing.records, 0, []
    for _, size in _PARTS:
        out.append(_binary(rows["id"][:, start : start + size]))
        start += size
    numbers = [rows["length"], rows["checksum"], rows["sequence"], listing.used, np.full(len(rows), listing.segment)]
    return out + [pa.array(np.ascontiguousarray(c).astype(np.uint64)) for c in [*numbers, listing.slots, listing.offsets]]


def _binary(matrix: npt.NDArray[np.uint8]) -> pa.Array:
    """Rows of bytes as one column."""
    data = np.ascontiguousarray(matrix)
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(data.shape[1]), data.shape[0], [None, pa.py_buffer(data.tobytes())])
