"""Views lent by a store of many nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from hicache_ray.errors import StoreError
from hicache_ray.storage import bits
from hicache_ray.storage.lending import Released
from hicache_ray.storage.members import Member
from hicache_ray.storage.peers import NodeHandle, finish
from hicache_ray.storage.sharded_reads import Asked, Search
from hicache_ray.store import Bytes, Lent


class ManyLent(Released):
    """Views lent by several nodes, as one. Each node's own lease says whether its views hold."""

    def __init__(self, count: int, parts: Sequence[tuple[Sequence[int], Lent]]) -> None:
        self._parts = parts
        views: list[Bytes | None] = [None] * count
        for positions, lent in parts:
            for i, view in zip(positions, lent.views, strict=True):
                views[i] = view
        self.views: Sequence[Bytes | None] = views

    def valid(self) -> int:
        out = 0
        for positions, lent in self._parts:
            out |= bits.spread(lent.valid(), positions)
        return out

    def release(self) -> None:
        """Idempotent."""
        for _, lent in self._parts:
            lent.release()


def lease(asked: Asked, ids: Sequence[bytes], guess: int) -> Lent:
    """This node's views where it has the object; else those that a holder lends: a client of another node lends copies that it fetched."""
    here: Lent | None = None
    error: StoreError | None = None
    try:
        store = asked.local()
        here = None if store is None else store.lease(ids, asked.deadline.left())
    except StoreError as failed:
        error = failed
    missing = [i for i in range(len(ids)) if here is None or here.views[i] is None]
    if here is not None and (not missing or asked.deadline.passed()):
        return here
    parts: list[tuple[Sequence[int], Lent]] = [] if here is None else [(range(len(ids)), here)]
    search = Search(asked, ids)
    try:
        search.ask(missing, guess)
        wanted = bits.only(len(ids), missing)
        while wanted and not asked.deadline.passed() and (who := search.next(wanted)):
            for positions, lent in _borrow(search, who):
                parts.append((positions, lent))
                wanted &= ~bits.only(len(ids), [i for i, view in zip(positions, lent.views, strict=True) if view is not None])
    except BaseException:
        ManyLent(len(ids), parts).release()
        raise
    if error is not None and not parts:
        raise error
    return ManyLent(len(ids), parts)


def _borrow(search: Search, who: Mapping[Member, list[int]]) -> Iterator[tuple[Sequence[int], Lent]]:
    asked = search.asked
    sent = [(at, asked.send(member, _lend([search.ids[i] for i in at]))) for member, at in who.items()]
    finish([one for _, one in sent], asked.deadline)  # a lease that arrives later would never be released
    for positions, one in sent:
        try:
            yield positions, one.result()
        except StoreError:
            continue


def _lend(ids: Sequence[bytes]) -> Callable[[NodeHandle, float], Lent]:
    return lambda node, left: node.store.lease(ids, left)
