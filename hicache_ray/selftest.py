"""The layout self-test: before a rank serves, a pattern goes device -> host -> storage -> host -> device, on the way that pages will go.

The executor, pools, layouts, io backend and store are those of this very rank. In each of a few rounds a byte holds one digit of the
number of its own place (component, field, page, layer, token, head, byte), in the last one a check digit; so whatever a byte holds in the
end tells where it came from, and a mix-up can be named by its axis. A model would only have computed something else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hicache_ray.errors import LayoutBroken, StoreError
from hicache_ray.executor import Executor, Rank
from hicache_ray.keys import Namespace, chain
from hicache_ray.pool import Pool
from hicache_ray.records import Move, Slots, Span
from hicache_ray.spec import Component, Tier

Array: TypeAlias = npt.NDArray[Any]

#: Pages per component that make the journey, at most; of pages (snapshots) larger than ``LARGE`` bytes two do.
PAGES = 3
LARGE = 4 << 20
AXES = ("page", "layer", "token", "head", "byte")
NAMESPACE = "hicache_ray.selftest"
LEGS = ("from the device to the host", "from the host through storage and back", "from the host to the device")


@dataclass(frozen=True)
class Block:
    """One field's part of the pattern: places ``[base, base + size)``, the axes ``shape`` = (pages, layers, tokens, heads, bytes)."""

    component: str
    field: str
    base: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    def digits(self, number: int, last: int) -> Array:
        """The ``number``-th digits of all places; ``last``: which number stands for the check digits."""
        places = np.arange(self.base, self.base + self.size, dtype=np.int64)
        return (_check_digits(places) if number == last else (places >> 8 * number).astype(np.uint8)).reshape(self.shape)

    def at(self, place: int) -> tuple[str, str, tuple[int, ...]]:
        return self.component, self.field, tuple(int(i) for i in np.unravel_index(place - self.base, self.shape))


def _check_digits(places: Array) -> Array:
    return ((places * 2654435761) >> 21).astype(np.uint8) + np.uint8(1)


@dataclass
class Way:
    """The slots of one component's pages on their way: device, host, host again, device again."""

    component: Component
    slots: tuple[Slots, Slots, Slots, Slots]
    blocks: list[Block] = field(default_factory=list)


def self_test(rank: Rank, executor: Executor, nonce: str, timeout_s: float = 2.0) -> str:
    """Raises :class:`LayoutBroken`, with the axis, where a byte does not arrive in its place. The pools must be empty; a few of their
    slots are overwritten. ``nonce``: unlike for all ranks that share the store. Returns a note for the operator: why storage was left out,
    or empty. What was stored is dropped again.
    """
    return _Journey(rank, executor, nonce, timeout_s).run()


class _Journey:
    def __init__(self, rank: Rank, executor: Executor, nonce: str, timeout_s: float) -> None:
        self.rank, self.executor, self.store, self.timeout_s = rank, executor, executor.store, timeout_s
        self.note = "" if self.store is not None else "the self-test left storage out: it is not attached"
        self.ways = list(self._ways())
        self.total = 1 + sum(block.size for way in self.ways for block in way.blocks)
        self.check = -(-self.total.bit_length() // 8)  # number of the check digit; the digits are those before it
        self.keys = self._keys(Namespace(NAMESPACE, salt=f"{nonce}/{rank.rank}"))
        #: (leg, component, field) -> what was found in each round
        self.found: dict[tuple[int, str, str], list[Array]] = {}

    def _ways(self) -> Iterator[Way]:
        base = 1  # zeros are no place
        for i, c in enumerate(self.rank.spec.components):
            device, host = (self.rank.pools[tier][c.name] for tier in (Tier.DEVICE, Tier.HOST))
            count = min(PAGES if device.page_bytes <= LARGE else 2, device.slots, host.slots)
            chosen = [_slots(pool, count, 4 * i + j) for j, pool in enumerate((device, host, host, device))]
            way = Way(c, (chosen[0], chosen[1], chosen[2], chosen[3]))
            for f in c.fields:
                _, layers, tokens, _, _ = device.rows(f.name).shape
                way.blocks.append(Block(c.name, f.name, base, (count, layers, tokens, f.heads, f.width * f.itemsize)))
                base += way.blocks[-1].size
            yield way

    def _keys(self, namespace: Namespace) -> list[bytes]:
        """Keys that this rank writes, also of replicated components, of which a rank writes every ``ranks``-th."""
        ranks, mine = self.rank.spec.ranks, self.rank.rank
        wanted = PAGES * (self.check + 1)
        numbers = np.arange(wanted * ranks * 8 + 64, dtype=np.int32)
        return [key for key in chain(namespace.digest(), 1, (), numbers) if key[-1] % ranks == mine][:wanted]

    def run(self) -> str:
        for number in range(self.check + 1):
            self._round(number)
        for leg in range(len(LEGS)):
            for way in self.ways:
                for block in way.blocks:
                    if rounds := self.found.get((leg, block.component, block.field)):
                        self._compare(leg, block, rounds)
        return self.note

    def _round(self, number: int) -> None:
        for way in self.ways:
            self._write(Tier.DEVICE, way, 0, number)
            self._write(Tier.HOST, way, 1, number, spoiled=True)
        self._move(Tier.DEVICE, Tier.HOST, [Span(w.component.name, w.slots[0], w.slots[1]) for w in self.ways])
        self._read(Tier.HOST, 0, 1, number)
        at = 2 if not self.note and self._through_storage(number) else 1
        for way in self.ways:
            if at == 1:  # what storage should have filled may lie in the same slots
                self._write(Tier.HOST, way, 1, number)
            self._write(Tier.DEVICE, way, 3, number, spoiled=True)
        self._move(Tier.HOST, Tier.DEVICE, [Span(w.component.name, w.slots[at], w.slots[3]) for w in self.ways])
        self._read(Tier.DEVICE, 2, 3, number)

    def _through_storage(self, number: int) -> bool:
        """Whether all pages came back; else the note says why not, and storage is left out from now on."""
        assert self.store is not None
        keys = {w.component.name: tuple(self.keys[number * PAGES : number * PAGES + len(w.slots[0])]) for w in self.ways}
        none = np.empty(0, dtype=np.int32)
        try:
            down = self._store_move(True, [Span(w.component.name, w.slots[1], none, keys[w.component.name]) for w in self.ways])
            for way in self.ways:
                self._write(Tier.HOST, way, 2, number, spoiled=True)
            good = down and self._store_move(False, [Span(w.component.name, none, w.slots[2], keys[w.component.name]) for w in self.ways])
            if good:
                self._read(Tier.HOST, 1, 2, number)
            return good
        finally:
            self._drop([key + self.rank.tags[name] for name, some in keys.items() for key in some])

    def _store_move(self, down: bool, spans: list[Span]) -> bool:
        source, target = (Tier.HOST, Tier.STORAGE) if down else (Tier.STORAGE, Tier.HOST)
        got = self.executor.execute(Move(0, NAMESPACE, source, target, tuple(spans), self.timeout_s))
        missing = sum(len(span) - bits.bit_count() for span, bits in zip(spans, got.bits, strict=False))
        if got.error or missing or len(got.bits) < len(spans):
            did = "take" if down else "give back"
            self.note = f"the self-test left storage out: it did not {did} all pages{f' ({got.error})' if got.error else ''}"
            return False
        return True

    def _drop(self, ids: list[bytes]) -> None:
        assert self.store is not None
        try:
            self.store.drop(ids, self.timeout_s)
        except StoreError as error:
            self.note = self.note or f"the self-test could not drop its pages from storage, which will evict them: {error}"

    def _move(self, source: Tier, target: Tier, spans: list[Span]) -> None:
        got = self.executor.execute(Move(0, NAMESPACE, source, target, tuple(spans)))
        if got.error:
            raise LayoutBroken(f"the self-test could not move pages from the {source.value} to the {target.value}: {got.error}")

    def _write(self, tier: Tier, way: Way, at: int, number: int, spoiled: bool = False) -> None:
        """This round's digits, or (``spoiled``) bytes that are all wrong, into the slots of the way's stage ``at``."""
        pool: Pool = self.rank.pools[tier][way.component.name]
        self.executor.settle(tier, way.component.name, way.slots[at], write=True)
        for block in way.blocks:
            digits = block.digits(number, self.check)
            rows = pool.rows(block.field)
            for page, slot in enumerate(way.slots[at].tolist()):
                content = ~digits[page] if spoiled else digits[page]
                rows[slot].copy_(pool.buffer.new_tensor(content).view(rows.shape[1:]))
        pool.buffer[:1].cpu()  # on a device: what was written is there before a copy in another queue reads it

    def _read(self, tier: Tier, leg: int, at: int, number: int) -> None:
        for way in self.ways:
            self.executor.settle(tier, way.component.name, way.slots[at])
            for block in way.blocks:
                rows = self.rank.pools[tier][way.component.name].rows(block.field)
                pages = [rows[slot].contiguous().cpu().numpy() for slot in way.slots[at].tolist()]
                self.found.setdefault((leg, block.component, block.field), []).append(np.stack(pages).reshape(block.shape))

    # -- what went wrong ----------------------------------------------------------------------------------------------------------------

    def _compare(self, leg: int, block: Block, rounds: list[Array]) -> None:
        wrong = np.zeros(block.shape, dtype=bool)
        for number, found in enumerate(rounds):
            wrong |= found != block.digits(number, self.check)
        if not wrong.any():
            return
        places = np.flatnonzero(wrong)
        if len(rounds) <= self.check:  # storage went away half-way: the digits that would tell are missing
            raise LayoutBroken(self._sentence(leg, block, int(places[0]), "byte", "something else"))
        come = np.zeros(len(places), dtype=np.int64)
        for number in range(self.check):
            come |= rounds[number].reshape(-1)[places].astype(np.int64) << 8 * number
        true = (_check_digits(come) == rounds[-1].reshape(-1)[places]) & (come > 0) & (come < self.total)
        axes = [self._axes(block, int(p), int(v)) if ok else "byte" for p, v, ok in zip(places[:4096], come, true, strict=False)]
        axis = max(dict.fromkeys(axes), key=axes.count)
        i = axes.index(axis)
        told = self._place(int(come[i])) if true[i] else "a byte that nobody wrote"
        raise LayoutBroken(self._sentence(leg, block, int(places[i]), axis, told))

    def _sentence(self, leg: int, block: Block, place: int, axis: str, told: str) -> str:
        return (
            f"the self-test at start found that pages do not survive the way {LEGS[leg]}: the axis {axis} is wrong. "
            f"{self._place(block.base + place)} holds {told}. Nothing is served; choose another cache.layout or cache.io_backend, and "
            "report this"
        )

    def _block(self, place: int) -> Block:
        return next(b for w in self.ways for b in w.blocks if b.base <= place < b.base + b.size)

    def _axes(self, block: Block, place: int, came: int) -> str:
        """The axes in which a byte has moved; the outermost kind of mix-up alone where it is of another component or field."""
        mine, other = block.at(block.base + place), self._block(came).at(came)
        if mine[0] != other[0]:
            return "component"
        if mine[1] != other[1]:
            return "field"
        return " and ".join(axis for axis, a, b in zip(AXES, mine[2], other[2], strict=True) if a != b)

    def _place(self, place: int) -> str:
        component, name, at = self._block(place).at(place)
        where = ", ".join(f"{axis} {i}" for axis, i in zip(AXES, at, strict=True))
        return f"component {component!r}, field {name!r}, {where}"


def _slots(pool: Pool, count: int, turn: int) -> Slots:
    """Some slots, in no order."""
    chosen = np.random.default_rng(turn).permutation(pool.slots)[:count].astype(np.int32)
    return chosen[::-1].copy() if count > 1 and (np.diff(chosen) > 0).all() else chosen
