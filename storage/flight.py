"""A store for any Arrow client: a small, read-only Arrow Flight endpoint over the same memory.

    do_get(ticket)             ticket: ids in hex, with commas between them (or one id as it is). A row per object that is there:
                               id binary | data large_binary | xxh3 uint64 (null where the store keeps no checksums)
    list_flights(criteria)     criteria: a prefix of ids in hex. A flight per namespace, with how many objects and bytes it has
    get_flight_info(path)      path: one prefix in hex. Tickets for all its objects
    do_action("stats")         the counters of the store as JSON

``data`` is copied and verified before it goes out: a slow reader may take longer than any lease. Every call needs the header
``authorization: Bearer <token>``. Bulk transfers between nodes use :mod:`~hicache_ray.storage.tcp`, which is several times faster.
"""

from __future__ import annotations

import hmac
import json
import logging
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow as pa

from hicache_ray.errors import ConfigError, StoreError
from hicache_ray.storage.copying import as_array, checksum
from hicache_ray.storage.ids import ID_BYTES
from hicache_ray.storage.tcp import require_token
from hicache_ray.store import SPACE_BYTES, Lent, Store

log = logging.getLogger("hicache_ray.storage")
SCHEMA = pa.schema([("id", pa.binary(ID_BYTES)), ("data", pa.large_binary()), ("xxh3", pa.uint64())])
_PER_TICKET = 64  # ids
_MOST_IDS = 16384  # of one ticket or one answer
_STORE_S = 10.0
_SHUTDOWN_S = 5.0


class FlightEndpoint:
    """Serves from construction to :meth:`close`; does not close the store. ``port`` 0: the system picks one."""

    def __init__(self, store: Store, host: str = "127.0.0.1", port: int = 0, token: str = "") -> None:
        """Raises ConfigError."""
        require_token(token)
        flight = _flight()
        self.host = host
        try:
            self._server = _server_class(flight)(store, f"grpc://{host}:{port}", {"token": _middleware_class(flight)(token)})
        except (OSError, pa.ArrowException) as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error}; set another host or port of the Flight endpoint") from error

    @property
    def port(self) -> int:
        return int(self._server.port)

    @property
    def location(self) -> str:
        return f"grpc://{self.host}:{self.port}"

    def close(self) -> None:
        """Idempotent. Calls under way are given a few seconds to end."""
        thread = threading.Thread(target=self._server.shutdown, name="hicache-flight-shutdown", daemon=True)
        thread.start()
        thread.join(_SHUTDOWN_S)
        if thread.is_alive():
            log.warning("a reader of the Flight endpoint at %s does not end; it is left to itself", self.location)

    def __enter__(self) -> FlightEndpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _flight() -> Any:
    try:
        import pyarrow.flight
    except ImportError as error:
        raise ConfigError(f"this build of pyarrow has no Flight ({error}); install pyarrow from its wheel, or turn flight off") from error
    return pyarrow.flight


def _middleware_class(flight: Any) -> Any:
    class Token(flight.ServerMiddlewareFactory):
        """Turns away every call without the token."""

        def __init__(self, token: str) -> None:
            super().__init__()
            self._wanted = f"Bearer {token}".encode()

        def start_call(self, info: Any, headers: Mapping[str, Sequence[Any]]) -> None:
            given = [value for name, values in headers.items() if name.lower() == "authorization" for value in values]
            found = [value.encode() if isinstance(value, str) else bytes(value) for value in given]
            if len(found) != 1 or not hmac.compare_digest(found[0], self._wanted):
                log.warning("a Flight call without the right token was refused")
                raise flight.FlightUnauthenticatedError("send the header 'authorization: Bearer <token>' with the token of this store")

    return Token


def _server_class(flight: Any) -> Any:
    class Server(flight.FlightServerBase):
        def __init__(self, store: Store, location: str, middleware: Mapping[str, Any]) -> None:
            super().__init__(location, middleware=middleware)
            self._store = store

        def do_get(self, context: Any, ticket: Any) -> Any:
            batches = _batches(self._store, _told(flight, _ids_of, ticket.ticket))
            return flight.GeneratorStream(SCHEMA, _all_told(flight, batches))

        def list_flights(self, context: Any, criteria: bytes) -> Iterator[Any]:
            prefix = _told(flight, _prefix_of, criteria)
            counts = Counter(id[:SPACE_BYTES] for id in _told(flight, self._store.scan, prefix, _STORE_S))
            for space, count in sorted(counts.items()):
                yield flight.FlightInfo(SCHEMA, flight.FlightDescriptor.for_path(space.hex()), [], count, -1)

        def get_flight_info(self, context: Any, descriptor: Any) -> Any:
            prefix = _told(flight, _prefix_of, b"".join(descriptor.path or []))
            ids = sorted(_told(flight, self._store.scan, prefix, _STORE_S))
            if len(ids) > _MOST_IDS:
                raise flight.FlightServerError(f"{len(ids)} objects begin with this prefix; ask for at most {_MOST_IDS}, with a longer one")
            tickets = [",".join(id.hex() for id in ids[at : at + _PER_TICKET]) for at in range(0, len(ids), _PER_TICKET)]
            return flight.FlightInfo(SCHEMA, descriptor, [flight.FlightEndpoint(ticket.encode(), []) for ticket in tickets], len(ids), -1)

        def do_action(self, context: Any, action: Any) -> list[bytes]:
            if action.type != "stats":
                raise flight.FlightServerError(f"there is no action {action.type!r}; the only one is stats")
            return [json.dumps(asdict(_told(flight, self._store.stats, _STORE_S))).encode()]

        def list_actions(self, context: Any) -> list[tuple[str, str]]:
            return [("stats", "the counters of the store as JSON")]

    return Server


def _told(flight: Any, call: Any, *arguments: Any) -> Any:
    """The result; a StoreError becomes an error that an Arrow client can read."""
    try:
        return call(*arguments)
    except StoreError as error:
        raise flight.FlightServerError(str(error)) from error


def _all_told(flight: Any, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same for what fails while a reader reads."""
    while (batch := _told(flight, next, batches, None)) is not None:
        yield batch


def _ids_of(ticket: bytes) -> list[bytes]:
    """Raises StoreError."""
    if len(ticket) == ID_BYTES:
        return [ticket]
    try:
        ids = [bytes.fromhex(part) for part in ticket.decode("ascii").split(",")]
    except ValueError as error:
        raise StoreError("a ticket is a list of ids in hex, with commas between them") from error
    if len(ids) > _MOST_IDS or any(len(id) != ID_BYTES for id in ids):
        raise StoreError(f"a ticket names at most {_MOST_IDS} ids of {ID_BYTES} bytes each")
    return ids


def _prefix_of(text: bytes) -> bytes:
    """Raises StoreError."""
    try:
        return bytes.fromhex(text.decode("ascii"))
    except ValueError as error:
        raise StoreError("a prefix of ids is written in hex") from error


def _batches(store: Store, ids: Sequence[bytes]) -> Iterator[pa.RecordBatch]:
    """One batch per object that is there and fits its checksum. Raises StoreError."""
    for at in range(0, len(ids), _PER_TICKET):
        some = ids[at : at + _PER_TICKET]
        with store.lease(some, _STORE_S) as lent:
            sums: Sequence[int | None] = getattr(lent, "checksums", None) or [None] * len(some)
            for i, id in enumerate(some):
                batch = _batch(id, i, sums[i], lent)
                if batch is not None:
                    yield batch


def _batch(id: bytes, i: int, known: int | None, lent: Lent) -> pa.RecordBatch | None:
    """Of a copy, as the bytes wait for the reader's network, and nobody waits for that with the store's memory."""
    view = lent.views[i]
    data = None if view is None else as_array(view).copy()
    if data is None or (known is not None and checksum(data) != known) or not lent.valid() >> i & 1:
        return None
    offsets = pa.py_buffer(np.array([0, data.nbytes], np.int64))
    column = pa.Array.from_buffers(pa.large_binary(), 1, [None, offsets, pa.py_buffer(data)])
    return pa.RecordBatch.from_arrays([pa.array([id], pa.binary(ID_BYTES)), column, pa.array([known], pa.uint64())], schema=SCHEMA)
