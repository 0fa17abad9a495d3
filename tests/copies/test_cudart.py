"""What copies ask of the CUDA runtime, against a library of the same functions that works on plain memory.

Where CUDA's headers are, the stand-in is compiled against them, so that its prototypes (and with them the ctypes declarations, and the
layout of the attributes) are CUDA's own.
"""

from __future__ import annotations

import ast
import ctypes
import itertools
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from hicache_ray.copies import BACKENDS, choose
from hicache_ray.copies_cudart import Attributes, Runtime
from hicache_ray.copies_jobs import Pages
from hicache_ray.errors import ConfigError, GroupLost
from hicache_ray.host_memory import touched
from hicache_ray.layout import ORDERS
from tests.copies.test_kernel import COMPONENTS, filled, pages_of
from tests.layers import product
from tests.layout_twin import copy_naively
from tests.on_host import compiler

DECLARED = """
#include <stddef.h>
typedef int cudaError_t; typedef void* cudaStream_t; enum cudaMemcpyKind { cudaMemcpyDefault = 4 };
enum { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
struct cudaMemLocation { int type, id; };
struct cudaMemcpyAttributes { int srcAccessOrder; struct cudaMemLocation srcLocHint, dstLocHint; unsigned flags; };
"""
BODY = r"""
#include <string.h>
static int calls; static int fail;
static void* const STREAM = (void*)0x77;
extern "C" {
int hc_calls() { int n = calls; calls = 0; return n; }
void hc_fail(int on) { fail = on; }
size_t hc_offset(int i) {
    size_t at[] = {offsetof(cudaMemcpyAttributes, srcAccessOrder), offsetof(cudaMemcpyAttributes, srcLocHint),
        offsetof(cudaMemcpyAttributes, dstLocHint), offsetof(cudaMemcpyAttributes, flags), sizeof(cudaMemcpyAttributes)};
    return at[i];
}
const char* cudaGetErrorString(cudaError_t error) { return "a sentence"; }
cudaError_t cudaGetLastError(void) { return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { *version = VERSION; return cudaSuccess; }
static cudaError_t check(int kind, cudaStream_t stream) {
    calls++;
    return fail || kind != cudaMemcpyDefault || (void*)stream != STREAM ? cudaErrorInvalidValue : cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* of, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
    if (cudaError_t error = check(kind, stream)) return error;
    memcpy(to, of, size);
    return cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* of, size_t of_pitch, size_t width, size_t height,
                              enum cudaMemcpyKind kind, cudaStream_t stream) {
    if (cudaError_t error = check(kind, stream)) return error;
    if (width > to_pitch || width > of_pitch) return cudaErrorInvalidValue;
    for (size_t i = 0; i < height; i++) memcpy((char*)to + i * to_pitch, (const char*)of + i * of_pitch, width);
    return cudaSuccess;
}
#if VERSION >= 13000
cudaError_t cudaMemcpyBatchAsync(void* const* to, const void* const* of, const size_t* sizes, size_t count,
    struct cudaMemcpyAttributes* attributes, size_t* indices, size_t number, cudaStream_t stream) {
#else
cudaError_t cudaMemcpyBatchAsync(void** to, void** of, size_t* sizes, size_t count,
    struct cudaMemcpyAttributes* attributes, size_t* indices, size_t number, size_t* failed, cudaStream_t stream) {
    *failed = count;
#endif
    if (cudaError_t error = check(cudaMemcpyDefault, stream)) return error;
    if (number != 1 || indices[0] != 0 || attributes->srcAccessOrder != 1 || attributes->flags != 0) return cudaErrorInvalidValue;
    for (size_t i = 0; i < count; i++) memcpy(to[i], of[i], sizes[i]);
    return cudaSuccess;
}
cudaError_t cudaHostRegister(void* at, size_t size, unsigned flags) { return fail || flags != 3 ? cudaErrorInvalidValue : cudaSuccess; }
cudaError_t cudaHostUnregister(void* at) { return cudaSuccess; }
cudaError_t cudaHostGetDevicePointer(void** out, void* at, unsigned flags) {
    *out = (char*)at + 4096;
    return fail ? cudaErrorInvalidValue : cudaSuccess;
}
}
"""
STREAM = 0x77


def headers() -> Path | None:
    nvcc = shutil.which("nvcc")
    roots = [Path(nvcc).resolve().parent.parent] if nvcc else []
    return next((root / "include" for root in [*roots, Path("/usr/local/cuda")] if (root / "include/cuda_runtime_api.h").exists()), None)


@pytest.fixture(scope="module", params=[12060, 12080, 13000])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    found, include, folder = compiler(), headers(), tmp_path_factory.mktemp("cudart")
    if found is None:
        pytest.skip("no C++ compiler here")
    # The headers here are of one version: the functions of another are compiled against declarations of our own.
    own = include is None or request.param != 13000
    source = folder / "cudart.cpp"
    source.write_text((DECLARED if own else "#include <cuda_runtime_api.h>\n#include <stddef.h>\n") + BODY)
    options = [f"-DVERSION={request.param}", "-shared", "-fPIC", "-O1", "-o", str(folder / "cudart.so"), str(source)]
    done = subprocess.run([found, *([] if own else [f"-I{include}"]), *options], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(folder / "cudart.so"))


def test_the_attributes_lie_as_cuda_has_them(library: ctypes.CDLL) -> None:
    library.hc_offset.restype = ctypes.c_size_t
    ours = [getattr(Attributes, name).offset for name in ("order", "source_type", "target_type", "flags")]
    assert [library.hc_offset(i) for i in range(5)] == [*ours, ctypes.sizeof(Attributes)]


def test_runs_go_in_batches_where_the_runtime_has_them(library: ctypes.CDLL) -> None:
    assert Runtime(library).batch is (Runtime(library).version >= 12080)


@pytest.mark.parametrize("name", COMPONENTS)
@pytest.mark.parametrize(("source", "target"), list(itertools.product(ORDERS, ORDERS)))
def test_all_pairs_of_layouts(name: str, source: str, target: str, library: ctypes.CDLL) -> None:
    runtime = Runtime(library)
    for batched in {False, runtime.batch}:
        a, b = filled(COMPONENTS[name], source, 7, 1), filled(COMPONENTS[name], target, 6, 2)
        of, to = [2, 3, 4, 0, 1], [0, 1, 2, 4, 5]
        expected = copy_naively(a, b, of, to)
        pages: Pages = pages_of(a, b, of, to)
        library.hc_calls()
        for job in pages.jobs():
            if batched:
                runtime.copy_runs(job.runs(), STREAM)
            else:
                runtime.copy_planes(job, STREAM)
        assert np.array_equal(b.buffer.numpy(), expected)
        calls = library.hc_calls()
        if batched:
            assert calls == len(pages.steps)
        if source == target == "page_first_direct":
            assert calls == (1 if batched else 2)  # five pages are two runs


def test_a_failed_call_is_a_sentence(library: ctypes.CDLL) -> None:
    runtime, memory = Runtime(library), np.zeros(64, dtype=np.uint8)
    at = int(memory.ctypes.data)
    runtime.register(at, 64)
    assert runtime.mapped(at) == at + 4096
    runtime.unregister(at)
    library.hc_fail(1)
    with pytest.raises(GroupLost, match="cudaHostRegister failed with code 1: a sentence"):
        runtime.register(at, 64)
    with pytest.raises(GroupLost, match="cudaHostGetDevicePointer failed with code 1: a sentence"):
        runtime.mapped(at)
    library.hc_fail(0)


@pytest.mark.parametrize("size", [1, 4096, 1_234_567])
def test_memory_to_be_pinned_has_exactly_its_size_and_is_there(size: int) -> None:
    """Every page of it exists already: none is touched for the first time by a request."""
    memory = touched(size, threads=3)
    assert (memory.nbytes, memory.ctypes.data % 4096, int(memory.sum())) == (size, 0, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    pages = -(-size // 4096)
    resident = (ctypes.c_ubyte * pages)()
    assert libc.mincore(ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(size), resident) == 0
    assert all(entry & 1 for entry in resident)


def test_the_table_has_both_backends_for_cuda_and_every_layout() -> None:
    for name in ("direct", "kernel"):
        layouts = {layout for row in BACKENDS if (row.device, row.name) == ("cuda", name) for layout in row.layouts}
        assert layouts == set(ORDERS)


def test_without_a_gpu_cuda_is_refused_at_start_with_the_reason() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    for setting in ("auto", "direct", "kernel"):
        with pytest.raises(ConfigError, match=r'"kernel" cannot run: torch finds no CUDA device|no CUDA device'):
            choose(setting, "cuda:0", "page_first")


def test_nothing_on_the_way_of_a_request_waits_for_a_device() -> None:
    """The one synchronise in the package is of a stream of our own, when a backend is opened."""
    found = {
        (module.name, function.name)
        for module in product()
        for function in ast.walk(ast.parse(module.source))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and "synchronize" in node.attr.lower()
    }
    assert found == {("hicache_ray.copies_cuda", "_batch_works")}
