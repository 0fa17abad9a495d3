"""The inner loops of the tcp plane, compiled with numba: a slice is received, hashed and put in its place, or hashed and sent.

They call the C library's ``recv`` and ``send`` themselves and hold no GIL: a megabyte costs four system calls and nothing else. Whoever
calls them has set the socket's own timeouts; they come back after ``_LIMIT_NS``, so that those are set anew. As of
:mod:`~hicache_ray.storage.kernel`, it takes addresses and compiles on import; :mod:`~hicache_ray.storage.tcp_streams` answers for them.
"""

from __future__ import annotations

import socket
import sys
import time
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped, unused-ignore]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from hicache_ray.storage.kernel import NUMBERS, WORDS, compiled, fence
from hicache_ray.storage.kernel_xxh3 import (
    BLOCK,
    SHORT,
    STRIPE,
    add_stripes,
    digest,
    last,
    move_stripes,
    move_stripes_stream,
    move_stripes_stream_16,
    scramble,
    start,
)

if sys.platform != "linux":
    raise ImportError("the loops know the C library of Linux only")
__all__ = ["END", "RECEIVED", "ROOM", "SHORT", "SHORT_READ", "receive", "send"]
#: What a loop returns: 0; END where the peer has hung up; SHORT_READ where less came than was waited for, because the socket's timeout
#: ended the wait; or the negative number of the system's error.
END, SHORT_READ = 1, 2
#: Bytes of one system call. What is sent is hashed before, and what is received is hashed after: twice that fits into a core's own cache.
#: Who receives less at once tells the sender more often that there is room again, and wakes it each time.
SLICE, RECEIVED = 256 << 10, 512 << 10
#: Bytes of the memory that is received into: a slice, and with it what would be too short for a slice of its own.
ROOM = RECEIVED + STRIPE
_LIMIT_NS = 2_000_000
_WAIT_ALL, _NO_SIGNAL = int(socket.MSG_WAITALL), int(socket.MSG_NOSIGNAL)
_MONOTONIC = int(time.CLOCK_MONOTONIC)
_INT = types.int64
_intrinsic: Any = intrinsic
_WORD, _NUMBER, _POINTER = ir.IntType(64), ir.IntType(32), ir.IntType(8).as_pointer()


def _transfer_intrinsic(name: str) -> Any:
    """``recv`` or ``send(descriptor, address, size, flags)``: bytes done, or the negative number of the error."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        descriptor, address, size, flags = args
        kind = ir.FunctionType(_WORD, [_NUMBER, _POINTER, _WORD, _NUMBER])
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        values = [builder.trunc(descriptor, _NUMBER), builder.inttoptr(address, _POINTER), size, builder.trunc(flags, _NUMBER)]
        done = builder.call(function, values)
        errno_at = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_NUMBER.as_pointer(), []), "__errno_location")
        error = builder.neg(builder.sext(builder.load(builder.call(errno_at, [])), _WORD))
        return builder.select(builder.icmp_signed("<", done, ir.Constant(_WORD, 0)), error, done)

    def typed(typingctx: Any, descriptor: Any, address: Any, size: Any, flags: Any) -> Any:
        return _INT(_INT, _INT, _INT, _INT), codegen

    return _intrinsic(typed)


_recv, _send = _transfer_intrinsic("recv"), _transfer_intrinsic("send")


@_intrinsic
def _now(typingctx: Any) -> Any:
    """Nanoseconds of the monotonic clock."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        room = cgutils.alloca_once(builder, ir.ArrayType(_WORD, 2))
        kind = ir.FunctionType(_NUMBER, [_NUMBER, _POINTER])
        function = cgutils.get_or_insert_function(builder.module, kind, "clock_gettime")
        builder.call(function, [ir.Constant(_NUMBER, _MONOTONIC), builder.bitcast(room, _POINTER)])
        seconds, nanos = (builder.load(cgutils.gep_inbounds(builder, room, 0, i)) for i in (0, 1))
        return builder.add(builder.mul(seconds, ir.Constant(_WORD, 1_000_000_000)), nanos)

    return _INT(), codegen


def _receive(descriptor: int, to: Any, sizes: Any, checksums: Any, sums: int, at: Any, scratch: int, room: int) -> int:
    """Fill on from ``at`` = [piece, bytes of it in place, bytes in ``room``, bytes to come of all, most of these at which to come back],
    for a while; ``at`` says how far it came.

    ``to, sizes``: int64 per piece, addresses and bytes, more than ``SHORT``. ``checksums``: uint64 per piece, written as one is complete.
    ``sums``, ``scratch``: addresses of 64 bytes each; the former are kept between the calls, as are the ``ROOM`` bytes at ``room``.

    The system copies a slice to where it copied the last one, which is still in the cache, and it goes from there past the caches to its
    place: that is cheaper than the system's own copy to memory that no cache holds, although it is one copy more, and hashes on the way.
    """
    piece, done, held, left, floor, result, began = at[0], at[1], at[2], at[3], at[4], 0, _now()
    while piece < len(sizes) and left > floor and result == 0 and _now() - began < _LIMIT_NS:
        target, size = to[piece], sizes[piece]
        if done == 0 and held == 0:
            start(sums)
        aside = target & 15 == 0
        source = room if aside else target + done
        part = size - done if size - done <= ROOM else RECEIVED
        got = _recv(descriptor, source + held, part - held, _WAIT_ALL)
        if got <= 0:
            result = got if got < 0 else END
            break
        held += got
        left -= got
        if held < part:
            result = SHORT_READ
            break
        stop = part if done + part < size else (part - 1) // BLOCK * BLOCK
        if not aside:
            for k in range(0, stop, BLOCK):
                add_stripes(0, source + k, sums, BLOCK // STRIPE)
                scramble(sums)
        elif target & (STRIPE - 1) == 0:
            for k in range(0, stop, BLOCK):
                move_stripes_stream(target + done + k, source + k, sums, BLOCK // STRIPE)
                scramble(sums)
        else:
            for k in range(0, stop, BLOCK):
                move_stripes_stream_16(target + done + k, source + k, sums, BLOCK // STRIPE)
                scramble(sums)
        if done + part == size:
            if aside:
                move_stripes(target + done + stop, source + stop, sums, (part - 1 - stop) // STRIPE)
            else:
                add_stripes(0, source + stop, sums, (part - 1 - stop) // STRIPE)
            last(target + size - STRIPE if aside else scratch, source + part - STRIPE, sums)
            checksums[piece] = digest(sums, size)
        done += part
        held = 0
        if done == size:
            piece += 1
            done = 0
    at[0], at[1], at[2], at[3] = piece, done, held, left
    fence()
    return result


def _send_pieces(descriptor: int, of: Any, sizes: Any, checksums: Any, sums: int, at: Any, scratch: int) -> int:
    """Send on from ``at`` = [piece, byte of it, bytes of it that are hashed]; else as :func:`_receive`, from where the pieces are."""
    piece, done, hashed, result, began = at[0], at[1], at[2], 0, _now()
    while piece < len(sizes) and _now() - began < _LIMIT_NS:
        source, size = of[piece], sizes[piece]
        whole = (size - 1) // BLOCK * BLOCK
        if done == 0 and hashed == 0:
            start(sums)
        want = min(SLICE, size - done)
        stop = whole if done + want == size else min((done + want) // BLOCK * BLOCK, whole)
        for k in range(hashed, stop, BLOCK):
            add_stripes(0, source + k, sums, BLOCK // STRIPE)
            scramble(sums)
        hashed = max(hashed, stop)
        sent = _send(descriptor, source + done, want, _NO_SIGNAL)
        if sent < 0:
            result = sent
            break
        done += sent
        if done == size:
            add_stripes(0, source + whole, sums, (size - 1 - whole) // STRIPE)
            last(scratch, source + size - STRIPE, sums)
            checksums[piece] = digest(sums, size)
            piece += 1
            done = hashed = 0
    at[0], at[1], at[2] = piece, done, hashed
    return result


_COMMON = (_INT, NUMBERS, NUMBERS, WORDS, _INT, NUMBERS, _INT)
receive = compiled(_receive, _INT(*_COMMON, _INT))
send = compiled(_send_pieces, _INT(*_COMMON))
