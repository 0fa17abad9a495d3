"""The inner loop of copies on a CPU, compiled with numba; it holds no GIL.

It takes addresses, not arrays, so that one function moves bytes between any two buffers: :mod:`hicache_ray.copies` has checked every
index before. Importing this module imports numba and compiles (once per machine: the result is kept on disk).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped, unused-ignore]
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

_ADDRESSES = types.Array(types.int64, 1, "C")
_LOOPS = types.Array(types.int64, 2, "C")
_ARGUMENTS = types.void(_ADDRESSES, _ADDRESSES, _ADDRESSES, _LOOPS, types.boolean, types.int64, types.int64)
#: A cache line, and what one non-temporal store writes (LLVM splits it where registers are narrower).
_LINE = 64
#: How far ahead of the copy lines are read: the hardware's own prefetching starts anew with each run. Worth up to 1.4 times
#: the speed with runs of 256 bytes to 32 KiB; 1 to 3 KiB gain less.
_AHEAD = 4096


@intrinsic
def _memcpy(typingctx: Any, target: Any, source: Any, size: Any) -> Any:
    """``memcpy`` of the C library."""
    signature = types.void(types.int64, types.int64, types.int64)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to, of = (builder.inttoptr(a, cgutils.voidptr_t) for a in args[:2])
        cgutils.raw_memcpy(builder, to, of, args[2], 1)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def _stream_line(typingctx: Any, target: Any, source: Any) -> Any:
    """Copy one line past the caches. ``target`` is a multiple of a line."""
    signature = types.void(types.int64, types.int64)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        line = ir.VectorType(ir.IntType(64), _LINE // 8).as_pointer()
        to, of = (builder.inttoptr(a, line) for a in args)
        store = builder.store(builder.load(of, align=1), to, align=_LINE)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def _prefetch(typingctx: Any, address: Any) -> Any:
    """Ask for a line. Any address will do, also one beyond the buffer: it never faults."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, number, number, number])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [cgutils.voidptr_t], kind)
        read, keep, data = ir.Constant(number, 0), ir.Constant(number, 3), ir.Constant(number, 1)
        builder.call(prefetch, [builder.inttoptr(args[0], cgutils.voidptr_t), read, keep, data])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def _fence(typingctx: Any) -> Any:
    """What was streamed is visible before what comes next."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


@njit(types.void(types.int64, types.int64, types.int64), nogil=True, cache=True)
def _stream(to: int, of: int, run: int) -> None:
    """Copy ``run`` bytes, all whole lines of the target past the caches."""
    head = min(run, -to & (_LINE - 1))
    if head:
        _memcpy(to, of, head)  # type: ignore[call-arg]
    lines = (run - head) // _LINE
    for k in range(lines):
        _prefetch(of + head + k * _LINE + _AHEAD)  # type: ignore[call-arg]
        _stream_line(to + head + k * _LINE, of + head + k * _LINE)
    done = head + lines * _LINE
    if done < run:
        _memcpy(to + done, of + done, run - done)  # type: ignore[call-arg]


@njit(_ARGUMENTS, nogil=True, cache=True)
def move(source: Any, target: Any, size: Any, loops: Any, stream: bool, begin: int, end: int) -> None:
    """Copy the units ``[begin, end)``: unit ``u`` is index ``u % loops[0, 0]`` of the outermost loop of piece ``u // loops[0, 0]``.

    ``source, target, size``: int64 per piece, addresses and bytes of a run. ``loops``: int64 [3, 3], each row a count, the source's stride
    and the target's. ``stream``: write past the caches. A plain store reads the line that it is about to overwrite, which costs a third
    of the memory's bandwidth; C's ``memcpy`` avoids it only for runs larger than the caches.
    """
    outer = loops[0, 0]
    for unit in range(begin, end):
        piece = unit // outer
        index = unit - piece * outer
        of, to, run = source[piece] + index * loops[0, 1], target[piece] + index * loops[0, 2], size[piece]
        for b in range(loops[1, 0]):
            for c in range(loops[2, 0]):
                of_run, to_run = of + b * loops[1, 1] + c * loops[2, 1], to + b * loops[1, 2] + c * loops[2, 2]
                if stream:
                    _stream(to_run, of_run, run)
                else:
                    _memcpy(to_run, of_run, run)  # type: ignore[call-arg]
    if stream:
        _fence()  # type: ignore[call-arg]
