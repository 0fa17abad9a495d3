"""The few functions of the CUDA runtime that copies call, through ctypes: torch has loaded that library where it can use a GPU at all."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from typing import Any

import numpy as np

from hicache_ray.copies_jobs import Job, Runs
from hicache_ray.errors import GroupLost

#: cudaMemcpyDefault: the direction follows from the addresses.
_DEFAULT = 4
#: cudaHostRegisterPortable | cudaHostRegisterMapped
_REGISTER = 3
#: cudaMemcpyBatchAsync came with 12.8 and lost an argument with 13.0.
_BATCH, _BATCH_SHORT = 12080, 13000
#: Runs in one call. What a call costs beside its runs is spread thin enough, and no array gets large.
_RUNS = 1 << 16


class Attributes(ctypes.Structure):
    """cudaMemcpyAttributes: order of reads (1: in the order of the stream), hints of (type, id) where both sides are, flags."""

    _fields_ = (
        ("order", c_int),
        ("source_type", c_int),
        ("source_id", c_int),
        ("target_type", c_int),
        ("target_id", c_int),
        ("flags", c_uint),
    )


class Runtime:
    """``library``: libcudart. ``batch``: whether many runs go in one call; :class:`GroupLost` where a call fails, as later ones would."""

    def __init__(self, library: Any) -> None:
        self._lib = library
        library.cudaGetErrorString.restype = c_char_p
        library.cudaMemcpyAsync.argtypes = [c_void_p, c_void_p, c_size_t, c_int, c_void_p]
        plane = [c_void_p, c_size_t, c_void_p, c_size_t, c_size_t, c_size_t, c_int, c_void_p]
        library.cudaMemcpy2DAsync.argtypes = plane
        library.cudaHostRegister.argtypes = [c_void_p, c_size_t, c_uint]
        library.cudaHostUnregister.argtypes = [c_void_p]
        library.cudaHostGetDevicePointer.argtypes = [POINTER(c_void_p), c_void_p, c_uint]
        version = c_int()
        self._call("cudaRuntimeGetVersion", byref(version))
        self.version = version.value
        self.batch = self.version >= _BATCH and hasattr(library, "cudaMemcpyBatchAsync")
        if self.batch:
            failed = [] if self.version >= _BATCH_SHORT else [c_void_p]
            arrays = [c_void_p, c_void_p, c_void_p, c_size_t, POINTER(Attributes), POINTER(c_size_t), c_size_t]
            library.cudaMemcpyBatchAsync.argtypes = [*arrays, *failed, c_void_p]

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._lib, name)(*arguments)
        if code:
            self._lib.cudaGetLastError()  # an error that is not sticky is forgotten
            raise GroupLost(f"{name} failed with code {code}: {self._lib.cudaGetErrorString(code).decode()}")

    def copy_runs(self, runs: Runs, stream: int) -> None:
        """Enqueue runs, many in a call. Needs ``batch``."""
        source, target, size = (np.ascontiguousarray(a) for a in runs)
        attributes, zero = Attributes(order=1), c_size_t(0)
        for at in range(0, len(size), _RUNS):
            part = slice(at, at + _RUNS)
            arrays = [target[part].ctypes.data, source[part].ctypes.data, size[part].ctypes.data, len(size[part])]
            failed = [] if self.version >= _BATCH_SHORT else [byref(c_size_t())]
            self._call("cudaMemcpyBatchAsync", *arrays, byref(attributes), byref(zero), 1, *failed, stream)

    def copy_planes(self, job: Job, stream: int) -> None:
        """Enqueue the runs of a job, those of its innermost loop in one call."""
        for source, target, width, height, source_pitch, target_pitch in job.planes():
            if height == 1:
                self._call("cudaMemcpyAsync", target, source, width, _DEFAULT, stream)
            else:
                self._call("cudaMemcpy2DAsync", target, target_pitch, source, source_pitch, width, height, _DEFAULT, stream)

    def register(self, address: int, size: int) -> None:
        """Pin host memory and map it for the device."""
        self._call("cudaHostRegister", address, size, _REGISTER)

    def unregister(self, address: int) -> None:
        self._call("cudaHostUnregister", address)

    def mapped(self, address: int) -> int:
        """Where the device sees registered host memory."""
        out = c_void_p()
        self._call("cudaHostGetDevicePointer", byref(out), address, 0)
        return int(out.value or 0)
