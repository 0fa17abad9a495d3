"""The inner loop of the arena's copies, compiled with numba: moves bytes and takes their xxh3-64 in one pass; it holds no GIL.

Every stripe is loaded, stored and added to the sums in one go, so the checksum is that of exactly the bytes that were written, and they
are read from memory once. It takes addresses, not arrays: :mod:`hicache_ray.storage.copying` answers for them. Importing this module
imports numba and compiles (once per machine, where the result can be kept on disk).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from hicache_ray.storage.kernel_xxh3 import (
    BLOCK,
    SHORT,
    STRIPE,
    digest,
    last,
    move_stripes,
    move_stripes_stream,
    move_stripes_stream_16,
    scramble,
    start,
)

__all__ = ["SHORT", "fence", "move"]
_VOID = types.void
_INT = types.int64
_intrinsic: Any = intrinsic


@_intrinsic
def _memcpy(typingctx: Any, to: Any, of: Any, size: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        target, source = (builder.inttoptr(a, cgutils.voidptr_t) for a in args[:2])
        cgutils.raw_memcpy(builder, target, source, args[2], 1)
        return context.get_dummy_value()

    return _VOID(_INT, _INT, _INT), codegen


@_intrinsic
def fence(typingctx: Any) -> Any:
    """What was streamed is visible before what comes next."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return _VOID(), codegen


def _move(of: Any, to: Any, sizes: Any, checksums: Any, sums: int, at: Any, end: int, budget: int, stream: bool) -> None:
    """Copy on from ``at`` = [piece, byte of it] up to piece ``end``, or until ``budget`` bytes are done; ``at`` says how far it came.

    ``of, to, sizes``: int64 per piece, addresses and bytes. ``checksums``: uint64 per piece, written as a piece of more than ``SHORT``
    bytes is complete. ``sums``: address of 64 bytes that are kept between the calls for a piece. ``stream``: write past the caches.
    """
    piece, done = at[0], at[1]
    while piece < end and budget > 0:
        source, target, size = of[piece], to[piece], sizes[piece]
        if size <= SHORT:
            _memcpy(target, source, size)
            piece += 1
            budget -= SHORT
            continue
        if done == 0:
            start(sums)
        whole = (size - 1) // BLOCK * BLOCK
        stop = min(whole, done + (budget + BLOCK - 1) // BLOCK * BLOCK)
        budget -= stop - done + BLOCK
        if stream and target & (STRIPE - 1) == 0:
            for k in range(done, stop, BLOCK):
                move_stripes_stream(target + k, source + k, sums, BLOCK // STRIPE)
                scramble(sums)
        elif stream and target & 15 == 0:
            for k in range(done, stop, BLOCK):
                move_stripes_stream_16(target + k, source + k, sums, BLOCK // STRIPE)
                scramble(sums)
        else:
            for k in range(done, stop, BLOCK):
                move_stripes(target + k, source + k, sums, BLOCK // STRIPE)
                scramble(sums)
        done = stop
        if done == whole:
            move_stripes(target + done, source + done, sums, (size - 1 - done) // STRIPE)
            last(target + size - STRIPE, source + size - STRIPE, sums)
            checksums[piece] = digest(sums, size)
            piece += 1
            done = 0
    at[0], at[1] = piece, done
    fence()


def compiled(function: Callable[..., Any], signature: Any) -> Callable[..., Any]:
    """Kept on disk where numba finds a folder that it may write; else compiled anew by each process that needs it. Holds no GIL."""
    try:
        found = njit(signature, nogil=True, cache=True)(function)
    except (RuntimeError, OSError):  # numba: no locator available
        found = njit(signature, nogil=True)(function)
    return found  # type: ignore[no-any-return, unused-ignore]


NUMBERS, WORDS = types.Array(types.int64, 1, "C"), types.Array(types.uint64, 1, "C")
MOVE = _VOID(NUMBERS, NUMBERS, NUMBERS, WORDS, _INT, NUMBERS, _INT, _INT, types.boolean)
move = compiled(_move, MOVE)
