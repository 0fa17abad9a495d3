"""What concerns all nodes of a store: drop, clear, scan, descriptions, counters."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from hicache_ray.errors import StoreError
from hicache_ray.storage.peers import NodeHandle, Sent, settle
from hicache_ray.storage.sharded_reads import Asked
from hicache_ray.store import StoreStats

T = TypeVar("T")


def everywhere(asked: Asked, call: Callable[[NodeHandle, float], T]) -> tuple[list[T], list[tuple[str, StoreError]]]:
    """On all nodes that are alive, in parallel: what they returned, and who failed with what."""
    sent: list[Sent[T]] = [asked.send(member, call) for member in asked.view.alive]
    settle(sent, asked.deadline)
    results, failed = [], []
    for one in sent:
        try:
            results.append(one.result())
        except StoreError as error:
            failed.append((one.member.node, error))
    return results, failed


def on_all(asked: Asked, what: str, call: Callable[[NodeHandle, float], T]) -> list[T]:
    """The same, where one node less would make the answer wrong. Raises StoreError."""
    results, failed = everywhere(asked, call)
    if failed:
        nodes = ", ".join(sorted(node for node, _ in failed))
        raise StoreError(f"{what} is not complete, as not every node answered: {nodes} ({failed[0][1]}); try again") from failed[0][1]
    if not results:
        raise StoreError(f"{what}: no node of the store is alive")
    return results


def on_some(asked: Asked, what: str, call: Callable[[NodeHandle, float], T]) -> list[T]:
    """The same, where the others' answers are worth something. Raises StoreError where there are none."""
    results, failed = everywhere(asked, call)
    if not results:
        raise failed[0][1] if failed else StoreError(f"{what}: no node of the store is alive")
    return results


def drop(asked: Asked, ids: Sequence[bytes]) -> int:
    """From every node, as no home need know all holders; all of them remember it, for who is away. In the order of :func:`clear`."""
    out = 0
    if ids:
        on_all(asked, "the drop", lambda node, left: node.directory.forget_ids(ids, left))
        for existed in on_all(asked, "the drop", lambda node, left: node.store.drop(ids, left)):
            out |= existed
        on_all(asked, "the drop", lambda node, left: node.directory.forget_ids(ids, left))
    return out


def clear(asked: Asked, again: Callable[[], Asked], prefix: bytes) -> int:
    """Fence, empty, forget; once more if a node came or left meanwhile. See :mod:`hicache_ray.storage.sharded_writes` for the late writer.

    Between the fence and the end, entries may be made of bytes that are still there; so the homes forget a second time.
    """
    steps = clearing(asked, again, prefix)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return int(end.value)


def clearing(asked: Asked, again: Callable[[], Asked], prefix: bytes) -> Generator[None, None, int]:
    """The same; what others do at the same time may come in between wherever it yields."""
    gone = 0
    while True:
        on_all(asked, "the clear", lambda node, left: node.directory.forget(prefix, left))
        yield
        gone += sum(on_all(asked, "the clear", lambda node, left: node.store.clear(left, prefix)))
        yield
        on_all(asked, "the clear", lambda node, left: node.directory.forget(prefix, left))
        version, asked = asked.view.version, again()
        if asked.view.version == version:
            return gone


def scan(asked: Asked, prefix: bytes) -> set[bytes]:
    return set().union(*on_all(asked, "the scan", lambda node, left: set(node.store.scan(prefix, left))))


def describe(asked: Asked, digest: bytes, record: Mapping[str, str]) -> None:
    on_some(asked, "the record", lambda node, left: node.store.describe(digest, record, left))


def described(asked: Asked) -> Mapping[bytes, Mapping[str, str]]:
    out: dict[bytes, Mapping[str, str]] = {}
    for records in on_some(asked, "the records", lambda node, left: node.store.described(left)):
        out |= records
    return out


def stats(asked: Asked) -> StoreStats:
    """The sum over the nodes that answer: an object with two copies counts twice, a read that went on to another node as two."""
    parts = on_some(asked, "the counters", lambda node, left: node.store.stats(left))
    return StoreStats(**{f.name: _sum([getattr(part, f.name) for part in parts]) for f in fields(StoreStats)})


def _sum(values: Sequence[Any]) -> Any:
    """Of numbers; of tables of numbers by their keys; of sentences, what they say."""
    if all(isinstance(value, str) for value in values):
        return "; ".join(dict.fromkeys(value for value in values if value))
    tables = [value for value in values if isinstance(value, Mapping)]
    if not tables:
        return sum(values)
    return {key: _sum([table[key] for table in tables if key in table]) for key in dict.fromkeys(k for table in tables for k in table)}
