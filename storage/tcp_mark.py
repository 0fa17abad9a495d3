"""The low-water mark of a socket: who waits for bulk is woken once for many packets, not for each.

The kernel wakes a reader only when as many bytes as the mark lie ready (``SO_RCVLOWAT``, socket(7)). So the mark may be up only while
more than that is sure to come: a read that waits for n bytes may sleep when it has n - 1 of them, and then as many as the mark must still
be on their way. It is down again before the tail of a transfer, and before anything else is awaited.

Should the bytes not come all the same (a sender that stops, a buffer or a window that is full below the mark on a kernel that does not
look at these), a wait under the mark ends after ``STALL_S``, and the rest of the transfer goes without.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

MARK = 512 << 10
STALL_S = 0.05
# A lower mark saves little. It is to be a part of the receive buffer only, because there the packets' own weight counts too.
_LEAST, _SHARE = 64 << 10, 4


class LowWater:
    """Of one socket. ``bytes``: where the mark is; 0: down, every byte wakes. ``most``: where it is when it is up; 0: it never is. All
    methods raise OSError."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self.bytes = sock, 0
        most = min(MARK, sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // _SHARE)
        # What the option does to a wait that has begun is known of this system only.
        self.most = most if sys.platform == "linux" and most >= _LEAST else 0

    @contextmanager
    def raised(self, total: int, want: int) -> Iterator[None]:
        """Up, where ``total`` bytes that come in reads of up to ``want`` are worth it, and down at the end."""
        if self.most and total >= 2 * (want + self.most):
            with contextlib.suppress(OSError):  # then it goes without
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, self.most)
                self.bytes = self.most
        try:
            yield
        finally:
            self.lower()

    def lower(self) -> None:
        if self.bytes:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
            self.bytes = 0

    def floor(self, left: int, want: int) -> int:
        """Lower the mark where no read of up to ``want`` bytes may begin under it when ``left`` are to come. Returns how many are left when
        it has to be lowered, at the least; 0 where it is down."""
        if self.bytes and left <= want + self.bytes:
            self.lower()
        return want + self.bytes if self.bytes else 0

    def patience(self, seconds: float) -> float:
        """How long one read may wait, of the ``seconds`` that are left. Where it is less, and a read was cut short, the mark is to be
        lowered."""
        return min(seconds, STALL_S) if self.bytes else seconds
