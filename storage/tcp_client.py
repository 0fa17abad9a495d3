"""The store of another node: a :class:`~hicache_ray.store.Store`, and that node's part of the directory, over tcp."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from hicache_ray.errors import StoreError
from hicache_ray.storage import bits, messages, tcp_frames, wire
from hicache_ray.storage.connection import Deadline
from hicache_ray.storage.copying import as_array
from hicache_ray.storage.ids import ID_BYTES, require_ids, require_keys
from hicache_ray.storage.segment import Array
from hicache_ray.storage.tcp import TcpAddress, TcpClientConfig, require_token
from hicache_ray.storage.tcp_directory import TcpDirectory
from hicache_ray.storage.tcp_frames import TcpKind, parts
from hicache_ray.storage.tcp_lent import RELEASE_S, TcpLent, fetch_lease, pack_release
from hicache_ray.storage.tcp_links import Borrowed, Link, Links
from hicache_ray.storage.tcp_moving import Item, Mover, fetch, fill
from hicache_ray.storage.wire import MAX_IDS, Reader
from hicache_ray.store import Answer, Bytes, StoreStats


class TcpStore(TcpDirectory):
    """Connects when first used, and again when the server was restarted or the network is back. May be used by several threads.

    A large get or put is spread over ``config.streams`` sockets. A get that loses its connection half way returns what had arrived whole.
    Not usable in a forked child (open another there); close() is safe there.
    """

    def __init__(
        self,
        address: TcpAddress | str,
        token: str,
        config: TcpClientConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
        incarnation: str = "",
    ) -> None:
        """``address``: of the server, or ``host:port``. ``incarnation``: the only one that is talked to, where it is given. Raises
        ConfigError."""
        require_token(token)
        self._config, self._clock = config or TcpClientConfig(), clock
        address = TcpAddress.parse(address) if isinstance(address, str) else address
        super().__init__(Links(address, token, self._config, clock, incarnation))
        self._mover = Mover(self._config.streams, self._config.connections, self._config.kernel)

    def warm_up(self, timeout_s: float) -> bool:
        """Load the compiled loops of the transfers, which the first large one begins to do anyway; True once they are used."""
        return self._mover.loops.warm_up(timeout_s)

    # -- objects -----------------------------------------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[bytes], tags: Sequence[bytes], timeout_s: float) -> Mapping[bytes, Answer]:
        require_keys(keys, tags)
        found = {tag: Answer() for tag in tags}
        with self._links.borrow(timeout_s) as borrowed:
            for at, some in parts(keys, MAX_IDS):
                for _, asked in parts(tags, max(wire.MAX_ASKED // len(some), 1)):
                    reply = borrowed.first.call(TcpKind.LOOKUP, messages.pack_lookup(some, asked), borrowed.deadline)
                    for tag, more in messages.unpack_answers(reply, asked, len(some)).items():
                        found[tag] = messages.joined(found[tag], more, at)
        return found

    def put(self, ids: Sequence[bytes], sources: Sequence[Bytes], timeout_s: float) -> int:
        require_ids(ids)
        arrays = [as_array(source) for _, source in zip(ids, sources, strict=True)]
        fresh = dict(zip(reversed(ids), reversed(arrays), strict=True))  # of equal ids the first counts
        visible: set[bytes] = set()
        with self._links.borrow(timeout_s) as borrowed:
            for _, some in parts(list(dict.fromkeys(ids)), MAX_IDS):
                visible |= self._put(borrowed, some, [fresh[id] for id in some])
        return bits.pack(id in visible for id in ids)

    def get(self, ids: Sequence[bytes], targets: Sequence[Bytes], timeout_s: float) -> int:
        require_ids(ids)
        arrays = [as_array(target, writable=True) for _, target in zip(ids, targets, strict=True)]
        verified = 0
        with self._links.borrow(timeout_s) as borrowed:
            for at, some in parts(ids, MAX_IDS):
                found, cut = self._get(borrowed, some, arrays[at : at + len(some)])
                verified |= found << at
                if cut:
                    break  # what has arrived counts; the rest is a miss
        return verified

    def lease(self, ids: Sequence[bytes], timeout_s: float) -> TcpLent:
        """As the protocol says; the views are read-only memoryviews of a copy that was verified here. At most MAX_IDS ids."""
        require_ids(ids)
        if len(ids) > MAX_IDS:
            raise StoreError(f"one lease covers at most {MAX_IDS} objects, not {len(ids)}")
        with self._links.borrow(timeout_s) as borrowed:
            return fetch_lease(self._links, self._mover, borrowed, ids, self._config.lease_bytes)

    def drop(self, ids: Sequence[bytes], timeout_s: float) -> int:
        require_ids(ids)
        existed = 0
        with self._links.borrow(timeout_s) as borrowed:
            for at, some in parts(ids, MAX_IDS):
                existed |= borrowed.first.call(TcpKind.DROP, wire.ids(some), borrowed.deadline).all_bits(len(some)) << at
        return existed

    def clear(self, timeout_s: float, prefix: bytes = b"") -> int:
        if len(prefix) > ID_BYTES:
            return 0
        return self._ask(TcpKind.CLEAR, wire.number(len(prefix), "H") + prefix, timeout_s).last_number("Q")

    def scan(self, prefix: bytes = b"", timeout_s: float = 10.0) -> Iterator[bytes]:
        if len(prefix) > ID_BYTES:
            return iter(())
        found: list[bytes] = []
        with self._links.borrow(timeout_s) as borrowed:
            first = more = 1
            while more:
                ask = wire.number(first, "B") + wire.number(len(prefix), "H") + prefix
                reply = borrowed.first.call(TcpKind.SCAN, ask, borrowed.deadline)
                first, more = 0, reply.number("B")
                found += reply.ids()
                reply.end()
        return iter(found)

    # -- administration ----------------------------------------------------------------------------------------------------------

    def describe(self, digest: bytes, record: Mapping[str, str], timeout_s: float) -> None:
        self._ask(TcpKind.DESCRIBE, messages.pack_record(digest, record), timeout_s).end()

    def described(self, timeout_s: float) -> Mapping[bytes, Mapping[str, str]]:
        return messages.unpack_records(self._ask(TcpKind.DESCRIBED, b"", timeout_s))

    def stats(self, timeout_s: float) -> StoreStats:
        """Puts that the server refused for want of room in flight count as refused too."""
        return messages.unpack_stats(self._ask(TcpKind.STATS, b"", timeout_s))

    def ping(self, timeout_s: float) -> str:
        """Incarnation of the server that answers."""
        with self._links.borrow(timeout_s) as borrowed:
            borrowed.first.call(TcpKind.PING, b"", borrowed.deadline).end()
            return borrowed.first.incarnation

    def close(self) -> None:
        self._links.close()
        if self._links.ours:  # in a forked child there are no threads to stop
            self._mover.close()

    # -- inside ------------------------------------------------------------------------------------------------------------------

    def _put(self, borrowed: Borrowed, ids: Sequence[bytes], sources: Sequence[Array]) -> set[bytes]:
        """Reserve, send, seal; returns the ids that are visible then."""
        if not ids:
            return set()
        first, deadline = borrowed.first, borrowed.deadline
        reply = first.call(TcpKind.RESERVE, wire.ids(ids) + wire.numbers("Q", [data.nbytes for data in sources]), deadline)
        transfer, wanted = reply.number("Q"), reply.all_bits(len(ids))
        items = [Item(i, sources[i]) for i in bits.each(wanted)]
        try:
            error = self._mover.run(borrowed, items, fill(transfer, deadline, self._mover.loops))
            if not first.clean:
                raise error or StoreError("the connection is lost")
            visible = first.call(TcpKind.SEAL, wire.number(transfer, "Q") + wire.number(len(ids)), deadline).all_bits(len(ids))
        except BaseException:
            first.clean = False  # hanging up tells the server that nobody will seal
            raise
        return {ids[i] for i in bits.each(visible)}

    def _get(self, borrowed: Borrowed, ids: Sequence[bytes], targets: Sequence[Array]) -> tuple[int, bool]:
        """Lease, receive, verify, release; returns (bits of what is verified, whether a connection was lost)."""
        if not ids:
            return 0, False
        first, deadline = borrowed.first, borrowed.deadline
        lease, loans = tcp_frames.unpack_loans(first.call(TcpKind.LEASE, wire.ids(ids), deadline), len(ids))
        items = [Item(i, targets[i], checksum) for i, length, checksum in loans if length == targets[i].nbytes]
        error = self._mover.run(borrowed, items, fetch(lease, deadline, self._mover.loops))
        if lease and first.clean:
            self._release(first, lease, items, len(ids))
        return sum(1 << item.index for item in items if item.good), error is not None

    def _release(self, link: Link, lease: int, items: Sequence[Item], count: int) -> None:
        """Also at the very deadline. A report of damaged bytes is answered, so that they are gone when the call returns."""
        bad = sum(1 << item.index for item in items if item.bad)
        deadline = Deadline.after(self._clock, RELEASE_S)
        if bad:
            link.call(TcpKind.RELEASE, pack_release(lease, bad, count), deadline)
        else:
            link.tell(TcpKind.RELEASE, pack_release(lease, 0, 0), deadline)

    def _ask(self, kind: TcpKind, body: bytes, timeout_s: float) -> Reader:
        with self._links.borrow(timeout_s) as borrowed:
            return borrowed.first.call(kind, body, borrowed.deadline)
