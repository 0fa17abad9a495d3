"""What a tcp server answers without moving bytes of objects: questions, administration, the directory."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace

from hicache_ray.errors import StoreError
from hicache_ray.storage import messages, tcp_frames, wire
from hicache_ray.storage.connection import Deadline
from hicache_ray.storage.directory import Directory
from hicache_ray.storage.ids import require_ids, unpacked
from hicache_ray.storage.tcp_bulk import Asked, Budget, Fence
from hicache_ray.storage.tcp_frames import TcpKind
from hicache_ray.storage.wire import MAX_IDS, MAX_RECORDS, Reader, WireError
from hicache_ray.store import Store


class Operations:
    """Of one connection: the scan in progress is its only state."""

    def __init__(self, store: Store, fence: Fence, budget: Budget, directory: Directory | None) -> None:
        self._store, self._fence, self._budget, self._directory = store, fence, budget, directory
        self._scanned: Iterator[bytes] = iter(())
        self._table: Mapping[TcpKind, Callable[[Reader, Deadline], bytes]] = {
            TcpKind.LOOKUP: self._lookup,
            TcpKind.DROP: self._drop,
            TcpKind.CLEAR: self._clear,
            TcpKind.SCAN: self._scan,
            TcpKind.DESCRIBE: self._describe,
            TcpKind.DESCRIBED: self._described,
            TcpKind.STATS: self._stats,
            TcpKind.PING: lambda reader, _: reader.rest(),
            TcpKind.EPOCH: self._epoch,
            TcpKind.ANNOUNCE: self._announce,
            TcpKind.WITHDRAW: self._withdraw,
            TcpKind.WHERE: self._where,
            TcpKind.HOLDERS: self._holders,
            TcpKind.FORGET: self._forget,
            TcpKind.FORGET_IDS: self._forget_ids,
            TcpKind.FORGOTTEN: self._forgotten,
        }

    def answer(self, kind: TcpKind, reader: Reader, deadline: Deadline) -> bytes:
        """Body of the reply. Raises WireError for what is no request, StoreError for a refusal."""
        operation = self._table.get(kind)
        if operation is None:
            raise WireError(f"{kind.name} is not a request")
        return operation(reader, deadline)

    def _lookup(self, reader: Reader, deadline: Deadline) -> bytes:
        keys, tags = messages.unpack_lookup(reader)
        reader.end()
        if isinstance(self._store, Asked):
            return messages.pack_answers(self._store.lookup_packed(keys, tags, deadline.left()), len(keys))
        found = self._store.lookup(unpacked(keys), tags, deadline.left())
        return messages.pack_answers([found[tag] for tag in tags], len(keys))

    def _drop(self, reader: Reader, deadline: Deadline) -> bytes:
        ids = reader.ids()
        reader.end()
        return wire.bitset(self._store.drop(ids, deadline.left()), len(ids))

    def _clear(self, reader: Reader, deadline: Deadline) -> bytes:
        prefix = _prefix(reader)
        return wire.number(self._fence.clear(prefix, deadline), "Q")

    def _scan(self, reader: Reader, deadline: Deadline) -> bytes:
        """A page of at most MAX_IDS ids, and whether more may come (the client does not choose where to go on)."""
        first, prefix = reader.number("B"), _prefix(reader)
        if first:
            self._scanned = self._store.scan(prefix, deadline.left())
        page = list(itertools.islice(self._scanned, MAX_IDS))
        return wire.number(int(len(page) == MAX_IDS), "B") + wire.ids(page)

    def _describe(self, reader: Reader, deadline: Deadline) -> bytes:
        digest, record = messages.unpack_record(reader)
        self._store.describe(digest, record, deadline.left())
        return b""

    def _described(self, reader: Reader, deadline: Deadline) -> bytes:
        reader.end()
        records = self._store.described(deadline.left())
        raw = json.dumps({digest.hex(): dict(record) for digest, record in records.items()}).encode()
        if len(raw) > 2 * MAX_RECORDS:
            raise StoreError(f"the descriptions take {len(raw)} bytes; a server sends at most {2 * MAX_RECORDS}")
        return raw

    def _stats(self, reader: Reader, deadline: Deadline) -> bytes:
        reader.end()
        stats = self._store.stats(deadline.left())
        return json.dumps(asdict(replace(stats, put_refused=stats.put_refused + self._budget.refused))).encode()

    # -- the directory -----------------------------------------------------------------------------------------------------------

    @property
    def _home(self) -> Directory:
        if self._directory is None:
            raise StoreError("this node keeps no directory")
        return self._directory

    def _epoch(self, reader: Reader, deadline: Deadline) -> bytes:
        reader.end()
        return wire.number(self._home.epoch(deadline.left()), "Q")

    def _announce(self, reader: Reader, deadline: Deadline) -> bytes:
        since, holder, ids = reader.number("Q"), tcp_frames.unpack_name(reader), reader.ids()
        reader.end()
        return wire.bitset(self._home.announce(holder, ids, deadline.left(), since), len(ids))

    def _withdraw(self, reader: Reader, deadline: Deadline) -> bytes:
        holder, ids = tcp_frames.unpack_name(reader), reader.ids()
        reader.end()
        self._home.withdraw(holder, ids, deadline.left())
        return b""

    def _where(self, reader: Reader, deadline: Deadline) -> bytes:
        keys, tags = tcp_frames.unpack_question(reader)
        return tcp_frames.pack_where(self._home.where(keys, tags, deadline.left()), tags, len(keys))

    def _holders(self, reader: Reader, deadline: Deadline) -> bytes:
        ids = reader.ids()
        reader.end()
        require_ids(ids)
        return tcp_frames.pack_holders(self._home.holders(ids, deadline.left()))

    def _forget(self, reader: Reader, deadline: Deadline) -> bytes:
        prefix = _prefix(reader)
        return wire.number(self._home.forget(prefix, deadline.left()), "Q")

    def _forget_ids(self, reader: Reader, deadline: Deadline) -> bytes:
        ids = reader.ids()
        reader.end()
        return wire.number(self._home.forget_ids(ids, deadline.left()), "Q")

    def _forgotten(self, reader: Reader, deadline: Deadline) -> bytes:
        seconds = reader.real()
        reader.end()
        return tcp_frames.pack_forgotten(self._home.forgotten(seconds, deadline.left()))


def _prefix(reader: Reader) -> bytes:
    prefix = reader.take(reader.number("H"))
    reader.end()
    return prefix
