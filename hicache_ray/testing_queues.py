"""Parts of the test kit for a device with queues: the stand-in engine enqueues its work and goes on, as an engine on a GPU does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import numpy.typing as npt

from hicache_ray.copies import Backend, Mover
from hicache_ray.copies_fake import FakeDevice
from hicache_ray.copies_queues import Queue
from hicache_ray.errors import EngineError
from hicache_ray.layout import ORDERS
from hicache_ray.pool import Pool
from hicache_ray.records import Compute, Outcome, Tokens
from hicache_ray.spec import CacheSpec, Component
from hicache_ray.testing_parts import ContentEngine


def fake_mover(device: FakeDevice, name: str = "direct") -> Mover:
    """A mover whose copies between device and host pools are done by ``device``."""
    return Mover(Backend(name, "fake", tuple(ORDERS), open=lambda _: device), threads=1)


class QueuedEngine(ContentEngine):
    """What :class:`ContentEngine` does, in a device's queue: layer by layer it looks at what a model would read, then writes its pages.

    A wrong byte is among ``device.errors``: nobody waits for the work.
    """

    def __init__(
        self, rank: int, spec: CacheSpec, pools: Mapping[str, Pool], prompts: Mapping[str, Tokens], device: FakeDevice,
        wait_layer: Callable[[str, int], None],
    ) -> None:  # fmt: skip
        super().__init__(rank, spec, pools, prompts)
        self.device = device
        self.wait_layer = wait_layer

    def run(self, record: Compute) -> Outcome:
        tokens = self.prompts[record.rid]
        states = [c for c in self.spec.components if c.is_state]
        for c in states:
            for layer in range(len(c.layers)):
                self._read(record, tokens, c, layer)
        paged = [c for c in self.spec.components if not c.is_state]
        for n in sorted({n for c in paged for n in c.layers}):
            for c in paged:
                if n in c.layers:
                    self._read(record, tokens, c, c.layers.index(n))
        for c in self.spec.components:
            for end, slot in self.made(c, record):
                content = self.content(c, tokens, end)
                self.device.enqueue(Queue.COMPUTE, partial(self.write, c, slot, content), f"write {c.name}")
        return self.sampled(record, tokens)

    def _read(self, record: Compute, tokens: Tokens, component: Component, layer: int) -> None:
        self.wait_layer(component.name, layer)
        for end, slot in self.used(component, record):
            expected = self._layer_of(component, self.content(component, tokens, end), layer)
            look = partial(self._look, record.rid, component, slot, layer, expected)
            self.device.enqueue(Queue.COMPUTE, look, f"read {component.name} {layer}")

    def _look(self, rid: str, component: Component, slot: int, layer: int, expected: list[npt.NDArray[np.uint8]]) -> None:
        pool = self.pools[component.name]
        for f, want in zip(component.fields, expected, strict=True):
            if not np.array_equal(pool.rows(f.name)[slot, layer].numpy(), want):
                raise EngineError(f"request {rid}: layer {layer} of component {component.name!r} has wrong bytes in slot {slot}")

    def _layer_of(self, component: Component, content: bytes, layer: int) -> list[npt.NDArray[np.uint8]]:
        """One layer of each field of a page in canonical order: [tokens, heads, row bytes]."""
        out, at = [], 0
        for f in component.fields:
            shape = tuple(self.pools[component.name].rows(f.name).shape[1:])
            size = int(np.prod(shape))
            out.append(np.frombuffer(content, np.uint8, size, at).reshape(shape)[layer])
            at += size
        return out
