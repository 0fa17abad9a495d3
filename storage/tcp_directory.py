"""A home's part of the directory, asked over tcp: see :class:`~hicache_ray.storage.directory.Directory`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hicache_ray.storage import messages, tcp_frames, wire
from hicache_ray.storage.directory import ALWAYS
from hicache_ray.storage.ids import ID_BYTES, require_ids, require_keys
from hicache_ray.storage.tcp_frames import TcpKind, parts
from hicache_ray.storage.tcp_links import Links
from hicache_ray.storage.wire import MAX_IDS


class TcpDirectory:
    """A directory client over the links of a store. Raises StoreError, also where that node keeps no directory."""

    def __init__(self, links: Links) -> None:
        self._links = links

    def epoch(self, timeout_s: float) -> int:
        with self._links.borrow(timeout_s) as borrowed:
            return borrowed.first.call(TcpKind.EPOCH, b"", borrowed.deadline).last_number("Q")

    def announce(self, holder: str, ids: Sequence[bytes], timeout_s: float, since: int = ALWAYS) -> int:
        require_ids(ids)
        entered = 0
        with self._links.borrow(timeout_s) as borrowed:
            for at, some in parts(ids, MAX_IDS):
                body = wire.number(since, "Q") + tcp_frames.pack_name(holder) + wire.ids(some)
                entered |= borrowed.first.call(TcpKind.ANNOUNCE, body, borrowed.deadline).all_bits(len(some)) << at
        return entered

    def withdraw(self, holder: str, ids: Sequence[bytes], timeout_s: float) -> None:
        require_ids(ids)
        with self._links.borrow(timeout_s) as borrowed:
            for _, some in parts(ids, MAX_IDS):
                borrowed.first.call(TcpKind.WITHDRAW, tcp_frames.pack_name(holder) + wire.ids(some), borrowed.deadline).end()

    def where(self, keys: Sequence[bytes], tags: Sequence[bytes], timeout_s: float) -> Mapping[bytes, Mapping[str, int]]:
        require_keys(keys, tags)
        found: dict[bytes, dict[str, int]] = {tag: {} for tag in tags}
        with self._links.borrow(timeout_s) as borrowed:
            for at, some in parts(keys, MAX_IDS):
                for _, asked in parts(tags, max(wire.MAX_ASKED // len(some), 1)):
                    reply = borrowed.first.call(TcpKind.WHERE, messages.pack_lookup(some, asked), borrowed.deadline)
                    for tag, held in tcp_frames.unpack_where(reply, asked, len(some)).items():
                        for holder, more in held.items():
                            found[tag][holder] = found[tag].get(holder, 0) | more << at
        return found

    def holders(self, ids: Sequence[bytes], timeout_s: float) -> Sequence[tuple[str, ...]]:
        require_ids(ids)
        found: list[tuple[str, ...]] = []
        with self._links.borrow(timeout_s) as borrowed:
            for _, some in parts(ids, MAX_IDS):
                reply = borrowed.first.call(TcpKind.HOLDERS, wire.ids(some), borrowed.deadline)
                found += tcp_frames.unpack_holders(reply, len(some))
        return found

    def forget(self, prefix: bytes, timeout_s: float) -> int:
        if len(prefix) > ID_BYTES:
            return 0
        with self._links.borrow(timeout_s) as borrowed:
            return borrowed.first.call(TcpKind.FORGET, wire.number(len(prefix), "H") + prefix, borrowed.deadline).last_number("Q")

    def forget_ids(self, ids: Sequence[bytes], timeout_s: float) -> int:
        require_ids(ids)
        gone = 0
        with self._links.borrow(timeout_s) as borrowed:
            for _, some in parts(ids, MAX_IDS):
                gone += borrowed.first.call(TcpKind.FORGET_IDS, wire.ids(some), borrowed.deadline).last_number("Q")
        return gone

    def forgotten(self, seconds: float, timeout_s: float) -> Sequence[tuple[bytes, float]]:
        with self._links.borrow(timeout_s) as borrowed:
            return tcp_frames.unpack_forgotten(borrowed.first.call(TcpKind.FORGOTTEN, wire.real(seconds), borrowed.deadline))
