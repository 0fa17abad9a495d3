"""A reservation, seal or lease of one object: what the service does for many, with plain numbers: arrays would take longer."""

from __future__ import annotations

from collections.abc import Callable

from hicache_ray.storage import messages, wire
from hicache_ray.storage.descriptors import Ready
from hicache_ray.storage.node import NodeStore
from hicache_ray.storage.wire import Kind, Reader


def _reserve(reader: Reader, node: NodeStore, owner: int, back_s: float) -> bytes | None:
    if reader.size != messages.ASK_RESERVE_ONE.size:
        return None
    count, id, length, seconds = reader.only(messages.ASK_RESERVE_ONE)
    if count != 1:
        return None
    return messages.RESERVATION_ONE.pack(*node.reserve_one(id, length, owner, messages.require_seconds(seconds)))


def _seal(reader: Reader, node: NodeStore, owner: int, back_s: float) -> bytes | None:
    length = 0
    if reader.size == messages.SEAL_ONE.size:
        reservation, count, done, checksum = reader.only(messages.SEAL_ONE)
    elif reader.size == messages.SEAL_AND_LEND.size:
        reservation, count, done, checksum, length = reader.only(messages.SEAL_AND_LEND)
    else:
        return None
    if count != 1 or done != 1:
        return None
    sealed = b"\1" if node.seal_one(reservation, checksum, owner) else b"\0"
    return sealed + _ready(node.spare(length, owner)) if length else sealed


def _write(reader: Reader, node: NodeStore, owner: int, back_s: float) -> bytes:
    spare, id, length, checksum, word = reader.only(messages.WRITE)
    outcome, ready = node.write_one(spare, id, length, checksum, word, owner)
    return wire.number(outcome, "B") + _ready(ready)


def _ready(ready: Ready | None) -> bytes:
    return b"" if ready is None else messages.READY.pack(*ready)


def _lease(reader: Reader, node: NodeStore, owner: int, back_s: float) -> bytes | None:
    if reader.size != messages.ASK_LEASE_ONE.size:
        return None
    count, id, seconds = reader.only(messages.ASK_LEASE_ONE)
    if count != 1:
        return None
    lease, seconds, loan = node.lease_one(id, owner, messages.require_seconds(seconds), min(back_s, seconds / 2))
    if loan is None:
        return messages.MISS_ONE.pack(lease, seconds, 0)
    return messages.LEASE_ONE.pack(lease, seconds, 1, *loan)


#: By kind: the body of the reply to a message, for connection ``owner``; None, and nothing done, where it is not about one object.
ONES: dict[int, Callable[[Reader, NodeStore, int, float], bytes | None]] = {
    int(Kind.RESERVE): _reserve,
    int(Kind.SEAL): _seal,
    int(Kind.LEASE): _lease,
    int(Kind.WRITE): _write,
}
