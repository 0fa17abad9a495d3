"""XXH3 as compiled code sees it: steps of the checksum on addresses, for the loops of :mod:`~hicache_ray.storage.kernel` and
:mod:`~hicache_ray.storage.kernel_tcp`.

XXH3 with 64 bits, seed 0 and the default secret (https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md) of inputs over ``SHORT`` bytes:
eight sums of 64 bits; stripes of 64 bytes; blocks of 16 stripes, after each of which the sums are scrambled; then the last 64 bytes once
more, whatever stripe they were in. The sums lie in 64 bytes at an address that the caller keeps.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped, unused-ignore]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

#: Bytes up to which xxh3 is another function: such pieces are copied here and summed elsewhere.
SHORT = 240
STRIPE, BLOCK = 64, 1024
#: How far ahead of the copy lines are read: the hardware's own prefetching begins anew with each page of memory.
_AHEAD = 4096

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_KEY_SCRAMBLE, _KEY_LAST, _KEY_MERGE = len(_SECRET) - STRIPE, len(_SECRET) - STRIPE - 7, 11  # where each part of the secret begins
_PRIME32 = 0x9E3779B1
_PRIME64 = 0x9E3779B185EBCA87
_START = (0xC2B2AE3D, _PRIME64, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x85EBCA77, 0x27D4EB2F165667C5, _PRIME32)
_AVALANCHE = 0x165667919E3779F9

_WORD = ir.IntType(64)
_SUMS = ir.VectorType(_WORD, 8)  # also a stripe of data, and a stripe of the secret
_SWAPPED = ir.Constant(ir.VectorType(ir.IntType(32), 8), [1, 0, 3, 2, 5, 4, 7, 6])
_VOID = types.void
_INT = types.int64
_intrinsic: Any = intrinsic  # typed as what takes part in typing, not as what compiled code calls


def _each(value: int) -> Any:
    return ir.Constant(_SUMS, [value] * 8)


def _load(builder: Any, address: Any, kind: Any = _SUMS) -> Any:
    """From any address."""
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def _store(builder: Any, value: Any, address: Any, align: int = 1, stream: bool = False) -> None:
    """``stream``: past the caches. LLVM splits a line into the widest stores that ``align`` allows."""
    store = builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=align)
    if stream:
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))


def _secret(builder: Any, offset: int) -> Any:
    """The address of a part of the secret."""
    kind = ir.ArrayType(ir.IntType(8), len(_SECRET))
    constant = cgutils.global_constant(builder, "xxh3_secret", ir.Constant(kind, bytearray(_SECRET)))
    return builder.add(builder.ptrtoint(constant, _WORD), ir.Constant(_WORD, offset))


def _prefetch(builder: Any, address: Any) -> None:
    """Ask for a line. Any address will do, also one beyond the buffer: it never faults."""
    number = ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, number, number, number])
    prefetch = builder.module.declare_intrinsic("llvm.prefetch", [cgutils.voidptr_t], kind)
    read, keep, data = ir.Constant(number, 0), ir.Constant(number, 3), ir.Constant(number, 1)
    builder.call(prefetch, [builder.inttoptr(address, cgutils.voidptr_t), read, keep, data])


def _added(builder: Any, sums: Any, data: Any, key: Any) -> Any:
    """The sums after one stripe."""
    mixed = builder.xor(data, key)
    product = builder.mul(builder.and_(mixed, _each(0xFFFFFFFF)), builder.lshr(mixed, _each(32)))
    return builder.add(builder.add(sums, builder.shuffle_vector(data, data, _SWAPPED)), product)


def _stripes_intrinsic(align: int, stream: bool) -> Any:
    """``stripes(to, of, sums, count)``: move ``count <= 16`` stripes and add them to the sums at ``sums``; ``align`` 0: only add."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to, of, sums_at, count = args
        key_at, size = _secret(builder, 0), ir.Constant(_WORD, STRIPE)
        sums = cgutils.alloca_once_value(builder, _load(builder, sums_at))
        with cgutils.for_range(builder, count, intp=_WORD) as loop:
            at = builder.mul(loop.index, size)
            _prefetch(builder, builder.add(builder.add(of, at), ir.Constant(_WORD, _AHEAD)))
            data = _load(builder, builder.add(of, at))
            if align:
                _store(builder, data, builder.add(to, at), align, stream)
            key = _load(builder, builder.add(key_at, builder.mul(loop.index, ir.Constant(_WORD, 8))))
            builder.store(_added(builder, builder.load(sums), data, key), sums)
        _store(builder, builder.load(sums), sums_at)
        return context.get_dummy_value()

    def typed(typingctx: Any, to: Any, of: Any, sums: Any, count: Any) -> Any:
        return _VOID(_INT, _INT, _INT, _INT), codegen

    return _intrinsic(typed)


add_stripes = _stripes_intrinsic(align=0, stream=False)
move_stripes = _stripes_intrinsic(align=1, stream=False)
move_stripes_stream = _stripes_intrinsic(align=STRIPE, stream=True)
move_stripes_stream_16 = _stripes_intrinsic(align=16, stream=True)


@_intrinsic
def start(typingctx: Any, sums: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _store(builder, ir.Constant(_SUMS, list(_START)), args[0])
        return context.get_dummy_value()

    return _VOID(_INT), codegen


@_intrinsic
def scramble(typingctx: Any, sums: Any) -> Any:
    """The end of a block."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sums = _load(builder, args[0])
        mixed = builder.xor(builder.xor(sums, builder.lshr(sums, _each(47))), _load(builder, _secret(builder, _KEY_SCRAMBLE)))
        _store(builder, builder.mul(mixed, _each(_PRIME32)), args[0])
        return context.get_dummy_value()

    return _VOID(_INT), codegen


@_intrinsic
def last(typingctx: Any, to: Any, of: Any, sums: Any) -> Any:
    """Move the last 64 bytes and add them under a key of their own. What of them was moved before is moved and summed once more."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to, of, sums_at = args
        data = _load(builder, of)
        _store(builder, data, to)
        _store(builder, _added(builder, _load(builder, sums_at), data, _load(builder, _secret(builder, _KEY_LAST))), sums_at)
        return context.get_dummy_value()

    return _VOID(_INT, _INT, _INT), codegen


@_intrinsic
def digest(typingctx: Any, sums: Any, size: Any) -> Any:
    """The checksum, from the sums of all stripes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide, half = ir.IntType(128), ir.Constant(ir.IntType(128), 64)
        result = builder.mul(args[1], ir.Constant(_WORD, _PRIME64))
        for pair in range(4):
            words = []
            for k in (16 * pair, 16 * pair + 8):
                own = _load(builder, builder.add(args[0], ir.Constant(_WORD, k)), _WORD)
                words.append(builder.zext(builder.xor(own, _load(builder, _secret(builder, _KEY_MERGE + k), _WORD)), wide))
            product = builder.mul(*words)
            folded = builder.xor(builder.trunc(product, _WORD), builder.trunc(builder.lshr(product, half), _WORD))
            result = builder.add(result, folded)
        result = builder.xor(result, builder.lshr(result, ir.Constant(_WORD, 37)))
        result = builder.mul(result, ir.Constant(_WORD, _AVALANCHE))
        return builder.xor(result, builder.lshr(result, ir.Constant(_WORD, 32)))

    return types.uint64(_INT, _INT), codegen
