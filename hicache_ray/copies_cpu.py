"""The inner loop of copies on a CPU, compiled with numba; it holds no GIL.

It takes addresses, not arrays, so that one function moves bytes between any two buffers: :mod:`hicache_ray.copies` has checked every
index before. Importing this module imports numba and compiles (once per machine: the result is kept on disk).
"""

from __future__ import annotations

from typing import Any

from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

_ADDRESSES = types.Array(types.int64, 1, "C")
_LOOPS = types.Array(types.int64, 2, "C")


@intrinsic
def _memcpy(typingctx: Any, target: Any, source: Any, size: Any) -> Any:
    """``memcpy`` of the C library: it beats a loop over words of any width from runs of 256 bytes on."""
    signature = types.void(types.int64, types.int64, types.int64)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to, of = (builder.inttoptr(a, cgutils.voidptr_t) for a in args[:2])
        cgutils.raw_memcpy(builder, to, of, args[2], 1)
        return context.get_dummy_value()

    return signature, codegen


@njit([types.void(_ADDRESSES, _ADDRESSES, _ADDRESSES, _LOOPS, types.int64, types.int64)], nogil=True, cache=True)
def move(source: Any, target: Any, size: Any, loops: Any, begin: int, end: int) -> None:
    """Copy the units ``[begin, end)``: unit ``u`` is index ``u % loops[0, 0]`` of the outermost loop of piece ``u // loops[0, 0]``.

    ``source, target, size``: int64 per piece, addresses and bytes of a run. ``loops``: int64 [3, 3], each row a count, the source's stride
    and the target's.
    """
    outer = loops[0, 0]
    for unit in range(begin, end):
        piece = unit // outer
        index = unit - piece * outer
        of, to, run = source[piece] + index * loops[0, 1], target[piece] + index * loops[0, 2], size[piece]
        for b in range(loops[1, 0]):
            for c in range(loops[2, 0]):
                _memcpy(to + b * loops[1, 2] + c * loops[2, 2], of + b * loops[1, 1] + c * loops[2, 1], run)  # type: ignore[call-arg]
