"""Bare sockets that say to a server whatever a test likes."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

P = TypeVar("P", bound="BarePeer")


class BarePeer:
    """Close it."""

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        self.sock = sock
        sock.settimeout(timeout_s)

    def close(self) -> None:
        self.sock.close()

    def read(self, count: int) -> bytes:
        """So many bytes."""
        data = b""
        while len(data) < count:
            more = self.sock.recv(count - len(data))
            assert more, "the server hung up"
            data += more
        return data

    def wait_for_the_end(self) -> bytes:
        """What the server still says until it hangs up."""
        said = b""
        with contextlib.suppress(ConnectionResetError):
            while data := self.sock.recv(65536):
                said += data
        return said

    def drip(self, frame: bytes, pace_s: float) -> int:
        """Send it byte by byte, each after a while in which nothing was said; how many were sent when the server hung up."""
        self.sock.settimeout(pace_s)
        for sent in range(len(frame)):
            try:
                self.sock.sendall(frame[sent : sent + 1])
                assert self.sock.recv(1) == b""
            except TimeoutError:
                continue
            except OSError:
                pass
            return sent
        raise AssertionError("all of it was waited for")


@contextmanager
def closing_all(peers: list[P]) -> Iterator[list[P]]:
    """Those that a test adds to the list are closed at its end."""
    try:
        yield peers
    finally:
        for peer in peers:
            peer.close()
