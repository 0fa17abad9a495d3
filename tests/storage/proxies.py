"""A wire between a client and a server that goes bad where a test says so: after so many bytes, not after so much time."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from hicache_ray.storage.tcp import TcpAddress

HARMS = ("flip", "cut", "hang")


@dataclass
class Harm:
    """``what`` happens at the byte ``at`` of those that one connection carries ``towards`` one side (``client`` or ``server``)."""

    what: str
    towards: str
    at: int


class Proxy:
    """Forwards to ``server``. ``harm``: done once, on the first connection that gets so far; ``struck`` is set then."""

    def __init__(self, server: TcpAddress, harm: Harm | None = None) -> None:
        self._server, self.harm = server, harm
        self.struck = threading.Event()
        self._lock = threading.Lock()
        self._socks: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = TcpAddress(*self._listener.getsockname()[:2])
        self._start(self._accept)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()  # so that no connection is added any more
        for sock in self._socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for sock in [self._listener, *self._socks]:
            sock.close()

    def _start(self, work: object, *arguments: object) -> None:
        self._threads.append(threading.Thread(target=work, args=arguments, daemon=True))  # type: ignore[arg-type]
        self._threads[-1].start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                self._socks.append(client)
                server = socket.create_connection((self._server.host, self._server.port))
            except OSError:
                return
            self._socks.append(server)
            self._start(self._forward, client, server, "server")
            self._start(self._forward, server, client, "client")

    def _forward(self, source: socket.socket, target: socket.socket, towards: str) -> None:
        seen = 0
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                harm = self._due(towards, seen + len(data))
                if harm is None:
                    target.sendall(data)
                elif harm.what == "flip":
                    at = max(harm.at - seen, 0)
                    target.sendall(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
                else:
                    target.sendall(data[: max(harm.at - seen, 0)])
                    if harm.what == "hang":
                        return  # the connection stays open, and nothing more comes
                    break
                seen += len(data)
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _due(self, towards: str, seen: int) -> Harm | None:
        with self._lock:
            harm = self.harm
            if harm is None or harm.towards != towards or seen <= harm.at:
                return None
            self.harm = None
            self.struck.set()
            return harm


@contextlib.contextmanager
def proxied(server: TcpAddress, harm: Harm | None = None) -> Iterator[Proxy]:
    proxy = Proxy(server, harm)
    try:
        yield proxy
    finally:
        proxy.close()
