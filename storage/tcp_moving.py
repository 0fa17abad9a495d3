"""Client's side of gets and puts: the objects of one call, spread over several links, each with a thread of ours."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from hicache_ray.errors import StoreError
from hicache_ray.storage import bits, wire
from hicache_ray.storage.connection import Deadline
from hicache_ray.storage.loading import Loader
from hicache_ray.storage.segment import Array
from hicache_ray.storage.tcp_frames import TcpKind, pack_indices
from hicache_ray.storage.tcp_links import Borrowed, Link

ALONE = 1 << 20  # bytes per link below which another link costs more than it saves


@dataclass
class Item:
    """One object on its way: ``index`` in the call, its memory here. ``checksum`` is what the other side says of a get. ``good``: it has
    arrived and fits; ``bad``: it has arrived and does not."""

    index: int
    data: Array
    checksum: int = 0
    good: bool = False
    bad: bool = False


Work = Callable[[Link, Sequence[Item]], None]


class Mover:
    """Threads of ours beside the caller's own, which always works too. Usable by several threads."""

    def __init__(self, streams: int, threads: int, kernel: str) -> None:
        self._streams = streams
        self._pool = ThreadPoolExecutor(max(threads, 1), thread_name_prefix="hicache-tcp-stream")
        #: The compiled loops, loaded in the background from the first large transfer on.
        self.loops = Loader("hicache_ray.storage.kernel_tcp", "send", "transfers take the slower way", off=kernel == "off")

    def run(self, borrowed: Borrowed, items: Sequence[Item], work: Work) -> StoreError | None:
        """Do ``work`` with a share of the items on each of several links; what went wrong on one of them says so, and its items.

        When it has returned or raised, none of our threads touches an item any more: all waits on a link end at its deadline, and
        whatever else happens, the links are hung up first.
        """
        size = sum(item.data.nbytes for item in items)
        links = borrowed.spread(min(self._streams, max(size // ALONE, 1)))
        shares = split(items, len(links))
        errors: list[StoreError] = []
        begun: set[int] = set()
        turn = threading.Lock()

        def one(number: int) -> None:
            with turn:
                mine = number not in begun
                begun.add(number)
            if mine:
                try:
                    work(links[number], shares[number])
                except StoreError as error:
                    errors.append(error)

        futures: list[Future[None]] = []
        own = [0]
        try:
            for number in range(1, len(links)):
                try:
                    futures.append(self._pool.submit(one, number))
                except RuntimeError:  # closed by another thread, or no thread can be had: should it be queued all the same, it finds
                    own.append(number)  # that the caller's thread has begun with it
            for number in own:
                one(number)
            for future in futures:
                future.result()
        except BaseException:
            with turn:
                begun.update(range(len(links)))
            for link in links:
                link.clean = False
                link.stream.hang_up()
            wait(futures)
            raise
        return errors[0] if errors else None

    def close(self) -> None:
        self._pool.shutdown(wait=True)
        self.loops.close()


def split(items: Sequence[Item], count: int) -> list[list[Item]]:
    """``count`` runs of items, about equal in bytes."""
    total, seen = sum(item.data.nbytes for item in items), 0
    shares: list[list[Item]] = [[] for _ in range(count)]
    for item in items:
        middle = seen + item.data.nbytes / 2
        shares[min(int(middle * count / total), count - 1) if total else 0].append(item)
        seen += item.data.nbytes
    return shares


def _loops(loops: Loader, items: Sequence[Item]) -> Any:
    """For a few bytes no compiler is loaded."""
    return loops.get() if sum(item.data.nbytes for item in items) >= ALONE else None


def fetch(lease: int, deadline: Deadline, loops: Loader) -> Work:
    """Receives into the items; those that fit their checksum are good."""

    def work(link: Link, items: Sequence[Item]) -> None:
        if not items:
            return
        link.ask(TcpKind.FETCH, pack_indices(lease, [item.index for item in items]), deadline)
        sent = link.answer(TcpKind.FETCH, deadline, more=True).all_bits(len(items))
        present = [items[n] for n in bits.each(sent)]
        sums: list[int | None] = [None] * len(present)
        try:
            link.stream.receive_objects([item.data for item in present], sums, deadline, _loops(loops, present))
            link.clean = True
        finally:
            for item, found in zip(present, sums, strict=True):
                item.good = found == item.checksum
                item.bad = found is not None and not item.good

    return work


def fill(transfer: int, deadline: Deadline, loops: Loader) -> Work:
    """Sends the items; those that the other side found to fit are good."""

    def work(link: Link, items: Sequence[Item]) -> None:
        if not items:
            return
        sums: list[int | None] = [None] * len(items)
        link.ask(TcpKind.FILL, pack_indices(transfer, [item.index for item in items]), deadline)
        link.stream.send_objects([item.data for item in items], sums, deadline, _loops(loops, items))
        link.stream.send([memoryview(wire.numbers("Q", [found or 0 for found in sums]))], deadline)
        good = link.answer(TcpKind.FILL, deadline).all_bits(len(items))
        for n in bits.each(good):
            items[n].good = True

    return work
