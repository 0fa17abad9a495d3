"""What any Arrow client sees of a store: the plain client of pyarrow, and nothing of ours on its side."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pyarrow as pa
import pytest
import xxhash

from hicache_ray.errors import ConfigError
from hicache_ray.storage import MemoryStore
from hicache_ray.storage.flight import FlightEndpoint, _batches
from hicache_ray.store import KEY_BYTES, SPACE_BYTES, Store
from tests.storage.objects import PAGE, TAG, TIMEOUT_S, name, page, put

flight = pytest.importorskip("pyarrow.flight", reason="this build of pyarrow has no Flight")
TOKEN = "a secret"


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(100 * PAGE)


@pytest.fixture
def endpoint(store: Store) -> Iterator[FlightEndpoint]:
    with FlightEndpoint(store, token=TOKEN) as running:
        yield running


@pytest.fixture
def client(endpoint: FlightEndpoint) -> Iterator[flight.FlightClient]:
    with flight.connect(endpoint.location) as connected:
        yield connected


def options(token: str = TOKEN) -> flight.FlightCallOptions:
    return flight.FlightCallOptions(timeout=TIMEOUT_S, headers=[(b"authorization", f"Bearer {token}".encode())])


def ticket(*numbers: int) -> flight.Ticket:
    return flight.Ticket(",".join(name(n).hex() for n in numbers))


def rows(table: pa.Table) -> dict[bytes, bytes]:
    return dict(zip(table["id"].to_pylist(), table["data"].to_pylist(), strict=True))


def test_objects_are_rows(store: MemoryStore, client: flight.FlightClient) -> None:
    put(store, range(100))
    table = client.do_get(ticket(3, 500, *range(10, 90)), options()).read_all()
    assert rows(table) == {name(n): page(n).tobytes() for n in (3, *range(10, 90))}
    assert table["xxh3"][0].as_py() == xxhash.xxh3_64_intdigest(page(3).data)
    assert rows(client.do_get(flight.Ticket(name(7)), options()).read_all()) == {name(7): page(7).tobytes()}
    assert store.stats(TIMEOUT_S).leases == 0


def test_damaged_bytes_are_not_served(store: MemoryStore, client: flight.FlightClient) -> None:
    put(store, [1, 2])
    store.damage(name(1))
    assert set(rows(client.do_get(ticket(1, 2), options()).read_all())) == {name(2)}


def test_what_goes_out_stays_as_it_was_read(store: MemoryStore) -> None:
    """A reader may be slower than the lease, and the memory another object's by the time that the bytes go out."""
    put(store, [1])
    (batch,) = _batches(store, [name(1)])
    store.damage(name(1))
    assert rows(pa.Table.from_batches([batch])) == {name(1): page(1).tobytes()}


def test_a_namespace_is_a_flight_and_its_tickets_give_its_objects(store: MemoryStore, client: flight.FlightClient) -> None:
    spaces = [bytes([space]) * SPACE_BYTES for space in (1, 2)]
    ids = [space + bytes(KEY_BYTES - SPACE_BYTES - 1) + bytes([n]) + TAG for space in spaces for n in range(70)]
    store.put(ids, [page(n, 100).data for n in range(140)], TIMEOUT_S)
    listed = {info.descriptor.path[0].decode(): info.total_records for info in client.list_flights(b"", options())}
    assert listed == {space.hex(): 70 for space in spaces}
    assert [info.total_records for info in client.list_flights(spaces[1].hex().encode(), options())] == [70]
    info = client.get_flight_info(flight.FlightDescriptor.for_path(spaces[1].hex()), options())
    found: dict[bytes, bytes] = {}
    for place in info.endpoints:
        found |= rows(client.do_get(place.ticket, options()).read_all())
    assert found == {ids[n]: page(n, 100).tobytes() for n in range(70, 140)}


def test_stats_are_an_action(store: MemoryStore, client: flight.FlightClient) -> None:
    put(store, [1])
    (result,) = client.do_action(flight.Action("stats", b""), options())
    assert json.loads(result.body.to_pybytes())["objects"] == 1
    assert [action.type for action in client.list_actions(options())] == ["stats"]


@pytest.mark.parametrize("headers", [[], [(b"authorization", b"Bearer another")], [(b"authorization", TOKEN.encode())]])
def test_without_the_token_nothing_is_answered(store: MemoryStore, client: flight.FlightClient, headers: list[tuple[bytes, bytes]]) -> None:
    put(store, [1])
    refused = flight.FlightCallOptions(timeout=TIMEOUT_S, headers=headers)
    with pytest.raises(flight.FlightUnauthenticatedError, match="Bearer"):
        client.do_get(ticket(1), refused).read_all()
    with pytest.raises(flight.FlightUnauthenticatedError):
        list(client.list_flights(b"", refused))
    with pytest.raises(flight.FlightUnauthenticatedError):
        list(client.do_action(flight.Action("stats", b""), refused))


@pytest.mark.parametrize("bad", [b"", b"zz", b"00,11", b"\xff\xfe"])
def test_bad_tickets_say_so(client: flight.FlightClient, bad: bytes) -> None:
    with pytest.raises(flight.FlightServerError, match="a ticket"):
        client.do_get(flight.Ticket(bad), options()).read_all()


def test_it_is_read_only(client: flight.FlightClient) -> None:
    writer, _ = client.do_put(flight.FlightDescriptor.for_path("x"), pa.schema([("id", pa.binary())]), options())
    with pytest.raises(NotImplementedError):
        writer.close()


def test_a_closed_store_is_an_error_that_says_so(store: MemoryStore, client: flight.FlightClient) -> None:
    store.close()
    with pytest.raises(flight.FlightServerError, match="closed"):
        list(client.do_action(flight.Action("stats", b""), options()))
    with pytest.raises(flight.FlightServerError, match="closed"):
        client.do_get(ticket(1), options()).read_all()


def test_a_token_is_needed_and_a_port_that_is_free(store: MemoryStore, endpoint: FlightEndpoint) -> None:
    with pytest.raises(ConfigError, match="needs a token"):
        FlightEndpoint(store)
    with pytest.raises(ConfigError, match="cannot listen"):
        FlightEndpoint(store, host="203.0.113.1", port=1, token=TOKEN)
