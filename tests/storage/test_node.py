"""The store of a node without sockets: what lies behind the arena, memory to receive into, and the handle in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from hicache_ray.errors import StoreClosed, StoreError, StoreTimeout
from hicache_ray.storage import ArenaClient, ArenaConfig, ArenaService, FaultyStore, LocalStore, MemoryStore, NodeStore, bits, open_store
from hicache_ray.storage.arena import Arena
from hicache_ray.storage.conformance_kit import Clock
from hicache_ray.storage.copying import SLICE, checksum
from hicache_ray.storage.ids import packed
from hicache_ray.storage.promotion import united
from hicache_ray.storage.segment import Segment, _huge_in
from hicache_ray.storage.tcp import TcpConfig
from hicache_ray.storage.tcp_client import TcpStore
from hicache_ray.storage.tcp_server import TcpServer
from hicache_ray.store import TAG_BYTES, Answer, Lent, Store
from tests.storage.conftest import PAGES, FakeClock
from tests.storage.objects import PAGE, TAG, TIMEOUT_S, get, key, name, page, present, put


class Told:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, object]] = []

    def on_sealed(self, ids: Sequence[bytes], lengths: Sequence[int]) -> None:
        assert len(ids) == len(lengths)
        self.events.append(("sealed", list(ids)))

    def on_removed(self, ids: Sequence[bytes], timeout_s: float) -> None:
        self.events.append(("removed", list(ids)))

    def on_cleared(self, prefix: bytes, timeout_s: float) -> None:
        self.events.append(("cleared", prefix))


class Hook(MemoryStore):
    """Does something once, between the reading of a lease and its return."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.hook: Callable[[], object] = lambda: None

    def lease(self, ids: Sequence[bytes], timeout_s: float) -> Lent:  # type: ignore[override]
        lent = super().lease(ids, timeout_s)
        hook, self.hook = self.hook, lambda: None
        hook()
        return lent


@pytest.fixture
def back() -> Hook:
    return Hook(10 * PAGES * PAGE)


@pytest.fixture
def node(config: ArenaConfig, back: Hook, nothing_left: None) -> Iterator[NodeStore]:
    made = NodeStore(Arena(config), back, Told())
    yield made
    made.check()
    made.close()
    made.close()


@pytest.fixture
def local(node: NodeStore) -> Iterator[LocalStore]:
    opened = LocalStore(node)
    yield opened
    opened.close()


def events(node: NodeStore) -> list[tuple[str, object]]:
    assert isinstance(node.behind, Told)
    return node.behind.events


@pytest.mark.parametrize(("here", "behind"), [(0, 0), (0, 5), (5, 0), (3, 4), (40_000, 50_000)])
def test_what_is_here_or_behind_is_named_once(here: int, behind: int) -> None:
    first = max(here - behind // 2, 0)
    found = united(packed([name(n) for n in range(here)]), (name(first + n) for n in range(behind)), None)
    assert found.shape == (max(here, first + behind), 64)
    assert {id.tobytes() for id in found} == {name(n) for n in range(max(here, first + behind))}


def test_what_is_read_in_one_batch_does_not_make_room_for_the_rest_of_it(node: NodeStore, local: LocalStore, back: Hook) -> None:
    """The oldest objects of a full arena are asked for together with some that are only behind it."""
    put(local, range(PAGES))
    put(back, range(PAGES, PAGES + 8))
    oldest = range(PAGES - 8, PAGES)  # of one put the first counts as the youngest
    asked = [*oldest, *range(PAGES, PAGES + 8)]
    assert get(local, asked) == set(asked)
    assert [n for n in range(PAGES) if name(n) not in node.arena.index] == list(range(PAGES - 16, PAGES - 8))


def test_what_is_behind_is_found_and_promoted(node: NodeStore, local: LocalStore, back: Hook) -> None:
    put(back, range(4))
    put(local, [4])
    assert present(local, range(6)) == set(range(5))
    assert node.arena.index.objects == 1  # a lookup moves nothing
    assert get(local, range(6)) == set(range(5))
    assert node.arena.index.objects == 5
    back.clear(TIMEOUT_S)
    assert get(local, range(6)) == set(range(5))
    assert events(node) == [("sealed", [name(4)])]  # what came from behind need not go there


def test_only_what_is_not_here_is_looked_up_behind(node: NodeStore, local: LocalStore, back: Hook) -> None:
    asked: list[tuple[list[bytes], list[bytes]]] = []
    lookup = back.lookup

    def noted(keys: Sequence[bytes], tags: Sequence[bytes], timeout_s: float) -> Mapping[bytes, Answer]:
        asked.append((list(keys), list(tags)))
        return lookup(keys, tags, timeout_s)

    back.lookup = noted  # type: ignore[method-assign]
    other = b"u" * TAG_BYTES
    put(local, [0, 1, 3])
    put(back, [2, 3])
    assert present(local, [0, 1]) == {0, 1}
    assert asked == []
    found = local.lookup([key(n) for n in (0, 2, 3, 4)], [TAG, other], TIMEOUT_S)
    assert (found[TAG].hit, found[other]) == (0b0111, Answer())
    assert present(local, [0, 2, 1, 4, 3]) == {0, 1, 2, 3}
    assert asked == [([key(n) for n in (0, 2, 3, 4)], [TAG, other]), ([key(2), key(4)], [TAG])]


def test_lookups_answer_the_same_before_and_after_their_loop_is_there(node: NodeStore, local: LocalStore, back: Hook) -> None:
    put(local, range(0, 30, 3))
    put(back, range(0, 30, 5))
    place = local.reserve([name(7)], [PAGE], TIMEOUT_S)
    keys, tags = [key(n) for n in range(30)], [TAG, b"u" * TAG_BYTES]
    before = local.lookup(keys, tags, TIMEOUT_S)
    assert node.warm_up(60.0)
    assert local.lookup(keys, tags, TIMEOUT_S) == before
    assert set(bits.each(before[TAG].hit)) == {*range(0, 30, 3), *range(0, 30, 5)}
    assert (before[TAG].pending, before[tags[1]]) == (1 << 7, Answer())
    place.abort()


def test_no_time_fetches_nothing(node: NodeStore, back: Hook) -> None:
    put(back, [1])
    assert not node.lease([name(1)], node.owner(), 5.0, 0.0).hit.any()


def test_a_promotion_never_evicts_what_is_leased(local: LocalStore, back: Hook) -> None:
    put(local, range(PAGES))
    put(back, [1000])
    with local.lease([name(n) for n in range(PAGES)], TIMEOUT_S) as lent:
        assert get(local, [1000]) == set()
        assert lent.valid() == (1 << PAGES) - 1
    assert get(local, [1000]) == {1000}


def test_what_is_damaged_behind_is_not_promoted_and_goes_there(node: NodeStore, local: LocalStore, back: Hook) -> None:
    put(back, [1, 2, 3])
    assert back.damage(name(2))
    assert get(local, [1, 2, 3]) == {1, 3}
    assert node.arena.index.objects == 2
    assert set(back.scan()) == {name(1), name(3)}
    assert back.stats(TIMEOUT_S).checksum_failures == 1


def test_a_promotion_ends_with_its_callers_deadline(config: ArenaConfig, nothing_left: None) -> None:
    """By a clock on which every look takes a second: what was copied by then is there, the rest is a miss."""
    clock, back = Clock(), Hook(16 * SLICE)
    node = NodeStore(Arena(replace(config, size_bytes=16 * SLICE, slab_bytes=None)), back, clock=clock)
    size = 9 * SLICE // PAGES  # all of them are more than the bytes between two looks
    ids = [name(n) for n in range(PAGES)]
    assert back.put(ids, [page(n, size) for n in range(PAGES)], TIMEOUT_S) == (1 << PAGES) - 1
    clock.step = 1.0
    hit = node.lease(ids, node.owner(), 5.0, 6.0).hit
    clock.step = 0.0
    assert 0 < hit.sum() < PAGES
    assert hit.tolist() == sorted(hit.tolist(), reverse=True)  # the first ones
    back.hook = lambda: clock.advance(5.0)
    assert not node.lease([ids[-1]], node.owner(), 5.0, 5.0).hit.any()
    assert node.stats().pending_bytes == 0
    node.check()
    node.close()


def test_a_clear_fences_promotions(node: NodeStore, local: LocalStore, back: Hook) -> None:
    put(back, [1, 2])
    back.hook = lambda: local.clear(TIMEOUT_S)
    assert get(local, [1, 2]) == set()
    assert node.arena.index.objects == back.stats(TIMEOUT_S).objects == node.stats().used_bytes == 0
    assert events(node) == [("cleared", b"")]


def test_drop_clear_and_scan_reach_both(node: NodeStore, local: LocalStore, back: Hook) -> None:
    put(local, [1, 2])
    put(back, [2, 3])
    assert set(local.scan()) == {name(1), name(2), name(3)}
    assert local.drop([name(1), name(3), name(9)], TIMEOUT_S) == 0b011
    assert set(local.scan()) == {name(2)}
    assert events(node)[-1] == ("removed", [name(1), name(3), name(9)])
    assert local.clear(TIMEOUT_S) == 1
    assert list(local.scan()) == []


def test_descriptions_come_from_behind_too(config: ArenaConfig, back: Hook, nothing_left: None) -> None:
    back.describe(b"12345678", {"tenant": "ann"}, TIMEOUT_S)
    node = NodeStore(Arena(config), back)
    node.describe(b"2", {"x": "y"}, TIMEOUT_S)
    assert node.described() == back.described(TIMEOUT_S) == {b"12345678": {"tenant": "ann"}, b"2": {"x": "y"}}
    assert "ann" in node.stats().tenants
    node.close()


def test_what_fails_behind_is_a_miss(config: ArenaConfig, back: Hook, nothing_left: None) -> None:
    put(back, [1])
    faulty = FaultyStore(back)
    node = NodeStore(Arena(config), faulty)
    local = LocalStore(node)
    put(local, [2])
    faulty.fault("lookup", "error")
    answer = local.lookup([key(1), key(2), key(3)], [TAG], TIMEOUT_S)[TAG]
    assert (answer.hit, answer.retry, answer.pending) == (0b010, 0b101, 0)
    assert present(local, [1, 2, 3]) == {1, 2}
    back.close()
    assert get(local, [1, 2]) == {2}
    local.close()
    node.close()


def test_through_the_service(config: ArenaConfig, back: Hook) -> None:
    put(back, [1, 2])
    with ArenaService(config, make_node=lambda arena: NodeStore(arena, back)) as service:
        client = ArenaClient(service.address)
        assert present(client, range(4)) == get(client, range(4)) == {1, 2}
        assert client.clear(TIMEOUT_S) == 2
        assert present(client, range(4)) == set()
        client.close()


def test_what_nobody_can_say_now_arrives_as_retry_through_every_client(config: ArenaConfig, back: Hook) -> None:
    put(back, [1])
    faulty = FaultyStore(back)
    with ArenaService(config, make_node=lambda arena: NodeStore(arena, faulty)) as service, ExitStack() as stack:
        socket, local = service.address.socket, LocalStore(service.node)
        clients: list[Store] = [local, ArenaClient(socket), open_store(socket)]
        server = stack.enter_context(TcpServer(local, TcpConfig("secret")))
        clients.append(TcpStore(server.address, "secret"))
        for client in clients:
            stack.callback(client.close)
        put(local, [2])
        place = local.reserve([name(3)], [PAGE], TIMEOUT_S)
        keys, tags = [key(n) for n in range(1, 5)], [TAG, b"u" * TAG_BYTES]
        for client in clients:
            faulty.fault("lookup", "error")
            assert client.lookup(keys, tags, TIMEOUT_S) == {TAG: Answer(0b0010, 0b0100, 0b1001), tags[1]: Answer(retry=0b1111)}
            assert client.lookup(keys, tags, TIMEOUT_S) == {TAG: Answer(0b0011, 0b0100), tags[1]: Answer()}
        place.abort()


def test_a_node_that_cannot_be_made_leaves_nothing(config: ArenaConfig, back: Hook) -> None:
    back.close()
    with pytest.raises(StoreClosed):
        ArenaService(config, make_node=lambda arena: NodeStore(arena, back)).start()


# -- the handle in this process --------------------------------------------------------------------------------------------------


def test_bytes_are_received_in_place(local: LocalStore) -> None:
    put(local, [1])
    with local.reserve([name(n) for n in range(4)], [PAGE] * 4, TIMEOUT_S) as place:
        assert [view is None for view in place.views] == [False, True, False, False]
        assert (place.present, place.pending) == (0b0010, 0)
        for n in (0, 2, 3):
            view = place.views[n]
            assert view is not None
            view[:] = page(n).tobytes()
        assert local.reserve([name(0)], [PAGE], TIMEOUT_S).pending == 1
        assert present(local, range(4)) == {1}
        assert place.seal(0b1101 & ~0b1000) == 0b0111
        assert place.seal(0b1101) == 0b0010  # too late
    assert get(local, range(4)) == {0, 1, 2}
    assert local.stats(TIMEOUT_S).used_bytes == 3 * PAGE


def test_what_is_not_received_is_given_up(node: NodeStore, local: LocalStore) -> None:
    with pytest.raises(ZeroDivisionError), local.reserve([name(1)], [PAGE], TIMEOUT_S):
        1 / 0  # noqa: B018
    place = local.reserve([name(1)], [PAGE], TIMEOUT_S)
    place.abort()
    place.abort()
    assert place.seal(1) == 0
    assert local.stats(TIMEOUT_S).used_bytes == 0
    local.reserve([name(1)], [PAGE], TIMEOUT_S)
    local.close()
    assert node.stats().used_bytes == 0


def test_a_late_seal_seals_nothing(config: ArenaConfig, clock: FakeClock, nothing_left: None) -> None:
    node = NodeStore(Arena(config, clock))
    local = LocalStore(node, clock=clock)
    place = local.reserve([name(1)], [PAGE], 3.0)
    clock.advance(3.0)
    assert place.over()
    assert place.seal(1) == 0
    with pytest.raises(StoreTimeout):
        local.reserve([name(1)], [PAGE], 0.0)
    local.close()
    node.close()


def test_lent_views_lie_in_the_segment_and_say_their_checksums(node: NodeStore, local: LocalStore) -> None:
    put(local, [1])
    with local.lease([name(1), name(2)], TIMEOUT_S) as lent:
        view = lent.views[0]
        assert isinstance(view, pa.Buffer)
        assert view.address == node.arena.segment.arrow.address
        assert list(lent.checksums) == [checksum(page(1)), None]


def test_a_lease_that_ran_out_is_a_miss_though_the_bytes_are_there(config: ArenaConfig, clock: FakeClock, nothing_left: None) -> None:
    node = NodeStore(Arena(config, clock))
    local = LocalStore(node, clock=clock)
    put(local, [1])
    lent = local.lease([name(1)], 2.0)
    sums = [checksum(page(1))]
    clock.advance(config.lease_s)
    assert (lent.valid(), lent.verify([0], sums)) == (0, 0)
    assert get(local, [1]) == {1}
    local.close()
    node.close()


def test_a_closed_node_says_so(config: ArenaConfig, nothing_left: None) -> None:
    node = NodeStore(Arena(config))
    local = LocalStore(node)
    put(local, [1])
    lent = local.lease([name(1)], TIMEOUT_S)
    place = local.reserve([name(2)], [PAGE], TIMEOUT_S)
    node.close()
    for call in (lambda: present(local, [1]), lambda: put(local, [3]), node.stats):
        with pytest.raises(StoreError, match="closed"):
            call()
    lent.release()
    place.abort()
    local.close()


def test_huge_bytes_are_those_of_the_mapping(tmp_path: object) -> None:
    smaps = ["1000-3000 rw-s 0 00:01 1 /x", "ShmemPmdMapped: 4 kB", "3000-9000 rw-s 0 00:01 2 /y", "FilePmdMapped: 8 kB",
             "ShmemPmdMapped: 2048 kB", "9000-a000 rw-s 0 00:01 3 /z", "ShmemPmdMapped: 16 kB"]  # fmt: skip
    assert _huge_in(smaps, 0x3800) == (2048 + 8) << 10
    assert _huge_in(smaps, 0xB000) == 0


def test_asking_for_huge_pages_changes_no_byte(config: ArenaConfig, nothing_left: None) -> None:
    arena = Arena(config)
    path, size = arena.segment.path, 4 << 20
    segment = Segment.create(path.parent / "segment-1", size, huge=True)
    segment.data[:] = np.arange(size, dtype=np.uint8)
    segment.prefault(2)
    segment.wait_prefaulted()
    assert (segment.data == np.arange(size, dtype=np.uint8)).all()
    assert segment.huge_bytes() % (2 << 20) == 0
    segment.close()
    arena.close()
