"""The CUDA kernel of the io backend ``kernel``: gather and scatter of pages between any two layouts, as one string of C++.

A thread copies one unit of 1 to 16 bytes; consecutive threads copy consecutive units of a run. :func:`launches` turns pages into launches:
the widest unit that every address, stride and length allows, and the numbers that the kernel computes its addresses from. The same source
compiles as plain C++ (without ``__CUDACC__``), with functions ``hc_copy_host_WIDTH`` that do on a CPU what the kernels do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from hicache_ray.copies_jobs import Pages, loops_of

#: Bytes of a unit, widest first.
WIDTHS = (16, 8, 4, 2, 1)

SOURCE = r"""
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define HC_DEVICE __device__ __forceinline__
#else
#define HC_DEVICE static inline
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
#endif

typedef long long hc_int;

/* Page slots, how often each loop runs, and how far each axis moves the source (s*) and the target (t*), all in bytes. */
#define HC_PARAMETERS \
    const hc_int* of, const hc_int* to, hc_int pages, hc_int units, hc_int source, hc_int target, hc_int s_page, hc_int t_page, \
    hc_int n0, hc_int s0, hc_int t0, hc_int n1, hc_int s1, hc_int t1, hc_int n2, hc_int s2, hc_int t2
#define HC_ARGUMENTS of, to, pages, units, source, target, s_page, t_page, n0, s0, t0, n1, s1, t1, n2, s2, t2

/* Unit `index` of pages * n0 * n1 * n2 * units: the run's own units vary fastest. */
template <typename T> HC_DEVICE void hc_copy_unit(hc_int index, HC_PARAMETERS) {
    hc_int unit = index % units; index /= units;
    hc_int c = index % n2; index /= n2;
    hc_int b = index % n1; index /= n1;
    hc_int a = index % n0; index /= n0;
    hc_int at = unit * (hc_int)sizeof(T);
    const T* source_at = (const T*)(source + of[index] * s_page + a * s0 + b * s1 + c * s2 + at);
    T* target_at = (T*)(target + to[index] * t_page + a * t0 + b * t1 + c * t2 + at);
    *target_at = *source_at;
}

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define HC_INSTANCE(WIDTH, T) \
    extern "C" __global__ void hc_copy_##WIDTH(HC_PARAMETERS) { \
        hc_int total = pages * n0 * n1 * n2 * units, step = (hc_int)gridDim.x * blockDim.x; \
        for (hc_int i = (hc_int)blockIdx.x * blockDim.x + threadIdx.x; i < total; i += step) hc_copy_unit<T>(i, HC_ARGUMENTS); \
    }
#else
#define HC_INSTANCE(WIDTH, T) \
    extern "C" void hc_copy_host_##WIDTH(HC_PARAMETERS) { \
        hc_int total = pages * n0 * n1 * n2 * units; \
        for (hc_int i = 0; i < total; i++) hc_copy_unit<T>(i, HC_ARGUMENTS); \
    }
#endif
HC_INSTANCE(16, uint4)
HC_INSTANCE(8, uint2)
HC_INSTANCE(4, unsigned)
HC_INSTANCE(2, unsigned short)
HC_INSTANCE(1, unsigned char)
"""


@dataclass(frozen=True)
class Launch:
    """One launch: the kernel of ``width`` bytes, how many units it copies, and its arguments after the two arrays of slots."""

    width: int
    total: int
    numbers: tuple[int, ...]


def launches(pages: Pages) -> Iterator[Launch]:
    """What copies these pages: one launch for each step of the plan."""
    for step in pages.steps:
        source, target = pages.source + step.source, pages.target + step.target
        loops = [tuple(int(n) for n in row) for row in loops_of(step)]
        moves = [n for count, *strides in loops if count > 1 for n in strides]
        width = _width(source, target, step.run, step.source_page, step.target_page, *moves)
        total = len(pages.of) * step.run // width * math.prod(count for count, _, _ in loops)
        flat = [n for row in loops for n in row]
        yield Launch(width, total, (len(pages.of), step.run // width, source, target, step.source_page, step.target_page, *flat))


def _width(*numbers: int) -> int:
    common = math.gcd(*numbers)
    return next(width for width in WIDTHS if common % width == 0)
