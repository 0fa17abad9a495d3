"""Io backends on CUDA: torch's streams and events, copies by copy engines (``direct``) or by a kernel through mapped host memory.

Nothing is imported or touched before a backend is asked for: cupy (the optional extra ``gpu``; only ``kernel`` needs it) in
:class:`KernelDevice`, the CUDA runtime in :func:`no_direct` and :func:`open_direct`. :func:`no_direct` and :func:`no_kernel` say what this
machine lacks.
"""

from __future__ import annotations

import ctypes
import importlib.util
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from hicache_ray.copies_cudart import Runtime
from hicache_ray.copies_jobs import Ints, Pages
from hicache_ray.copies_kernel import SOURCE, WIDTHS, launches
from hicache_ray.copies_queues import Device, Queue
from hicache_ray.errors import ConfigError, GroupLost
from hicache_ray.host_memory import touched
from hicache_ray.spec import Tier

#: Threads of a block, and blocks at most. 64 x 256 units of 16 bytes are enough in flight for a link of 100 GB/s with 2 us of latency, and
#: leave the other multiprocessors to the model.
BLOCK, BLOCKS = 256, 64
#: How often a thread that waits for an event looks at it.
LOOK_S = 0.0001


def no_direct() -> str:
    """What this machine lacks for copy engines; empty: nothing."""
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    try:
        _runtime()
    except OSError as error:
        return f"the CUDA runtime of this torch cannot be loaded ({error})"
    return ""


def no_kernel() -> str:
    """What this machine lacks for the kernel; empty: nothing."""
    if lacks := no_direct():
        return lacks
    if importlib.util.find_spec("cupy") is None:
        return "cupy is not installed; install the extra hicache-ray[gpu]"
    return ""


def _runtime() -> Runtime:
    major = (torch.version.cuda or "0").split(".")[0]
    return Runtime(ctypes.CDLL(f"libcudart.so.{major}"))


def open_direct(device: str) -> Device:
    return DirectDevice(device, _runtime())


def open_kernel(device: str) -> Device:
    return KernelDevice(device, _runtime())


class CudaDevice:
    """Queues and events. The engine's queue is the stream that is current in the thread that asks; copies have a stream of their own."""

    def __init__(self, device: str, runtime: Runtime) -> None:
        self.device = torch.device(device)
        self.runtime = runtime
        self._stream = torch.cuda.Stream(self.device)
        self._pinned: list[Pinned] = []

    def _of(self, queue: Queue) -> Any:
        return self._stream if queue is Queue.COPY else torch.cuda.current_stream(self.device)

    def mark(self, queue: Queue) -> Any:
        event = torch.cuda.Event()
        event.record(self._of(queue))
        return event

    def wait(self, queue: Queue, event: Any) -> None:
        self._of(queue).wait_event(event)

    def done(self, event: Any) -> bool:
        return bool(event.query())

    def join(self, event: Any, timeout_s: float) -> bool:
        until = time.monotonic() + timeout_s
        while not event.query():
            if time.monotonic() > until:
                return False
            time.sleep(LOOK_S)
        return True

    def accept(self, address: int) -> None:
        """Refuse a host pool that is not pinned: a copy of pageable memory would make its caller wait, and a kernel could not reach it."""
        try:
            self.runtime.mapped(address)
        except GroupLost as error:
            raise ConfigError(f"the host pools of a CUDA device need pinned memory (Mover.buffer gives it): {error}") from error

    def memory(self, tier: Tier, size: int) -> torch.Tensor:
        """A pool's memory: zeroed on the device, pinned on the host."""
        if tier is Tier.DEVICE:
            out = torch.zeros(size, dtype=torch.uint8, device=self.device)
            self._stream.wait_stream(torch.cuda.current_stream(self.device))  # no copy finds it half zeroed
            return out
        pinned = Pinned(size, self.runtime)
        self._pinned.append(pinned)
        return torch.from_numpy(pinned.bytes)

    def close(self) -> None:
        """Wait for this device's copies, and let pinned memory be plain memory again."""
        self.join(self.mark(Queue.COPY), 60.0)
        for pinned in self._pinned:
            pinned.close()
        self._pinned.clear()


class DirectDevice(CudaDevice):
    """Copies by copy engines. ``batched``: many runs in one call; else one call for each two-dimensional piece."""

    def __init__(self, device: str, runtime: Runtime) -> None:
        super().__init__(device, runtime)
        self.batched = runtime.batch and self._batch_works()

    def _batch_works(self) -> bool:
        """One small batch on this very machine: a driver may be older than the runtime. Later is too late to find out."""
        host, device = Pinned(64, self.runtime), torch.zeros(64, dtype=torch.uint8, device=self.device)
        try:
            runs = tuple(np.array([n], dtype=np.int64) for n in (host.address, device.data_ptr(), 64))
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            self.runtime.copy_runs(runs, self._stream.cuda_stream)  # type: ignore[arg-type]
        except GroupLost:
            return False
        finally:
            self._stream.synchronize()
            host.close()
        return True

    def copy(self, pages: Pages, label: str) -> None:
        with torch.cuda.device(self.device):
            for job in pages.jobs():
                if self.batched:
                    self.runtime.copy_runs(job.runs(), self._stream.cuda_stream)
                else:
                    self.runtime.copy_planes(job, self._stream.cuda_stream)


class KernelDevice(CudaDevice):
    """Copies by a kernel, which reads and writes the host's memory where the device sees it."""

    def __init__(self, device: str, runtime: Runtime) -> None:
        super().__init__(device, runtime)
        import cupy

        self._cupy = cupy
        self._mapped: dict[int, int] = {}
        self._last: tuple[Ints, Ints, torch.Tensor] | None = None
        with cupy.cuda.Device(self.device.index or 0):
            self._kernels = {width: cupy.RawKernel(SOURCE, f"hc_copy_{width}") for width in WIDTHS}
            for kernel in self._kernels.values():
                kernel.compile()  # seconds the first time on a machine

    def accept(self, address: int) -> None:
        super().accept(address)
        self._mapped[address] = self.runtime.mapped(address)

    def copy(self, pages: Pages, label: str) -> None:
        pages = replace(pages, source=self._mapped.get(pages.source, pages.source), target=self._mapped.get(pages.target, pages.target))
        index = self.device.index or 0
        slots = self._slots_of(pages)
        with self._cupy.cuda.Device(index), self._cupy.cuda.ExternalStream(self._stream.cuda_stream, index):
            for launch in launches(pages):
                numbers = [np.int64(n) for n in (slots[0].data_ptr(), slots[1].data_ptr(), *launch.numbers)]
                blocks = min(BLOCKS, -(-launch.total // BLOCK))
                self._kernels[launch.width]((blocks,), (BLOCK,), tuple(numbers))


    def _slots_of(self, pages: Pages) -> torch.Tensor:
        """[2, pages]: the slots where the kernel can read them; the layers of one load share them.

        They go through torch's allocators, which reuse neither side before the stream is done with it.
        """
        if self._last is None or self._last[0] is not pages.of or self._last[1] is not pages.to:
            with torch.cuda.stream(self._stream):
                slots = torch.from_numpy(np.stack([pages.of, pages.to])).pin_memory().to(self.device, non_blocking=True)
            self._last = pages.of, pages.to, slots
        return self._last[2]


class Pinned:
    """``size`` bytes of pinned host memory, zeroed: exactly so many, not rounded up to a power of two as torch's host allocator does."""

    def __init__(self, size: int, runtime: Runtime) -> None:
        self.bytes = touched(size, shared=True)
        self._runtime = runtime
        self.address = int(self.bytes.ctypes.data)
        runtime.register(self.address, size)

    def close(self) -> None:
        """The memory itself lives as long as somebody holds :attr:`bytes`."""
        self._runtime.unregister(self.address)


def buffer(tier: Tier, size: int, device: Device) -> torch.Tensor | None:
    """A pool's memory on a CUDA device; None for other devices, whose pools lie in plain memory."""
    return device.memory(tier, size) if isinstance(device, CudaDevice) and size else None
