"""Fields of any item size: fp8, and packed 4-bit payload with scales of another width, through pools, layouts, io backends and stores.

Bytes are opaque to everything but the engine; what must hold is that each field's own rows come back in their own places.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from hicache_ray.copies import Backend, Mover, choose
from hicache_ray.copies_fake import FakeDevice, copy_runs
from hicache_ray.copies_queues import Queue
from hicache_ray.executor import Executor, Rank
from hicache_ray.layout import ORDERS
from hicache_ray.pool import Pool
from hicache_ray.records import Move, Outcome, Span, slots_array
from hicache_ray.spec import CacheSpec, Component, Field, Kind, Tier
from hicache_ray.storage import ArenaClient, ArenaConfig, ArenaService
from hicache_ray.storage.memory import MemoryStore
from hicache_ray.store import KEY_BYTES, Store
from tests.on_host import OnHost
from tests.queues import slow

PAGE, SLOTS = 4, 7
#: 16 and 12 elements a head (K and V of unlike width); 4-bit elements are two to a byte.
COMPONENTS = {
    "fp8": Component("c", Kind.FULL, (Field("k", 2, 16, 1, "float8_e4m3fn"), Field("v", 2, 12, 1, "float8_e4m3fn")), (0, 1, 2)),
    "fp8 and fp32 scales": Component(
        "c", Kind.FULL,
        (Field("k_scale", 2, 1, 4, "float32"), Field("v_scale", 2, 1, 4, "float32"),
         Field("k", 2, 16, 1, "float8_e4m3fn"), Field("v", 2, 12, 1, "float8_e5m2")), (0, 1, 2),
    ),
    "4 bit and bf16 scales": Component(
        "c", Kind.FULL,
        (Field("k_scale", 2, 1, 2), Field("v_scale", 2, 1, 2), Field("k", 2, 8, 1, "uint8"), Field("v", 2, 6, 1, "uint8")), (0, 3),
    ),
    "4 bit and fp8 scales": Component(  # one scale for every four elements
        "c", Kind.FULL,
        (Field("k", 2, 8, 1, "uint8"), Field("k_scale", 2, 4, 1, "float8_e4m3fn"),
         Field("v", 2, 6, 1, "uint8"), Field("v_scale", 2, 3, 1, "float8_e4m3fn")), (0, 1, 2),
    ),
    "a latent in 4 bit, one fp32 scale": Component(
        "c", Kind.FULL, (Field("scale", 1, 1, 4, "float32"), Field("latent", 1, 18, 1, "uint8"), Field("rope", 1, 8, 2)), (0, 1)
    ),
    "a window in fp8": Component("c", Kind.WINDOW, (Field("k", 1, 5, 1, "float8_e4m3fn"),), (1, 4), 8),
    "entries in fp8 with scales": Component(
        "c", Kind.FULL, (Field("scale", 1, 1, 2), Field("entry", 1, 6, 1, "float8_e4m3fn")), (0, 1), ratio=2, page_span=2
    ),
    "a state of all kinds": Component(
        "c", Kind.STATE,
        (Field("recurrent", 4, 6, 4, "float32", (2, 3)), Field("conv", 1, 7, 1, "float8_e4m3fn"), Field("bits", 2, 3, 1, "uint8")), (0, 1),
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=["memory", "arena"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    if request.param == "memory":
        yield MemoryStore(1 << 20)
        return
    with ArenaService(ArenaConfig(f"test-items-{os.getpid()}", 4 << 20, slab_bytes=1 << 16, io_timeout_s=5.0)) as service:
        client = ArenaClient(service.address)
        yield client
        client.close()


def backends(kernel_on_host: OnHost) -> dict[str, Callable[[], Mover]]:
    def queued(name: str, copy: OnHost) -> Mover:
        device = FakeDevice(slow(Queue.COPY), copy)
        return Mover(Backend(name, "fake", tuple(ORDERS), open=lambda _: device), threads=1)

    return {
        "cpu": lambda: Mover(choose("auto", "cpu", "page_first"), threads=1),
        "direct": lambda: queued("direct", copy_runs),
        "kernel": lambda: queued("kernel", kernel_on_host),
    }


def numbers(pool: Pool, seed: int) -> dict[str, np.ndarray]:
    """Bytes for every row of every field: [slots, layers, tokens, heads, row bytes]."""
    rng = np.random.default_rng(seed)
    return {f.name: rng.integers(0, 256, tuple(pool.rows(f.name).shape), dtype=np.uint8) for f in pool.component.fields}


@pytest.mark.parametrize("backend", ["cpu", "direct", "kernel"])
@pytest.mark.parametrize("name", COMPONENTS)
def test_through_all_tiers_and_back(name: str, backend: str, store: Store, kernel_on_host: OnHost) -> None:
    """Device, host, store, host, device: in all pairs of layouts of device and host. The object is fields, layers, tokens, heads."""
    component = COMPONENTS[name]
    for n, (device_layout, host_layout) in enumerate(itertools.product(ORDERS, ORDERS)):
        pools = {Tier.DEVICE: Pool(component, PAGE, SLOTS, device_layout), Tier.HOST: Pool(component, PAGE, SLOTS, host_layout)}
        l1, l2 = pools[Tier.DEVICE], pools[Tier.HOST]
        tag = f"{list(COMPONENTS).index(name):02}{n:02}{backend:.4}".encode().ljust(16, b"-")
        rank = Rank(0, CacheSpec("test", PAGE, (component,)), {tier: {"c": pool} for tier, pool in pools.items()}, {"c": tag})
        mover = backends(kernel_on_host)[backend]()
        executor = Executor(rank, mover, store, lambda _: Outcome(), lambda: 0.0)
        made, keys = numbers(l1, n), tuple(bytes([n]) * (KEY_BYTES - 1) + end for end in (b"a", b"b"))
        for field, values in made.items():
            l1.rows(field).numpy()[...] = values

        def move(source: Tier, target: Tier, of: list[int], to: list[int], executor: Executor = executor, keys=keys) -> None:  # type: ignore[no-untyped-def]
            on_store = Tier.STORAGE in (source, target)
            span = Span("c", slots_array(of), slots_array(to), keys if on_store else ())
            assert executor.execute(Move(0, "r", source, target, (span,))) == Outcome(bits=(3,))

        move(Tier.DEVICE, Tier.HOST, [5, 1], [2, 6])
        move(Tier.HOST, Tier.STORAGE, [2, 6], [])
        move(Tier.STORAGE, Tier.HOST, [], [0, 3])
        move(Tier.HOST, Tier.DEVICE, [0, 3], [4, 2])
        if mover.order is not None:
            mover.order.drain()
        for field, values in made.items():
            want = values.copy()
            want[[4, 2]] = values[[5, 1]]
            assert np.array_equal(l1.rows(field).numpy(), want), (field, device_layout, host_layout)
            assert np.array_equal(l2.rows(field).numpy()[[0, 3]], values[[5, 1]])
        with store.lease([keys[0] + tag], 5.0) as lent:
            assert bytes(lent.views[0]) == b"".join(made[f.name][5].tobytes() for f in component.fields)  # type: ignore[arg-type]
        mover.close()


@pytest.mark.parametrize("layout", ORDERS)
@pytest.mark.parametrize("name", [name for name, c in COMPONENTS.items() if not c.is_state])
def test_an_engine_sees_its_own_types(name: str, layout: str) -> None:
    """Where the widest items come first, as here, every layout has views of every field in its dtype. (States are read as bytes.)"""
    component = COMPONENTS[name]
    pool = Pool(component, PAGE, SLOTS, layout)
    made = numbers(pool, 1)
    for field, values in made.items():
        pool.rows(field).numpy()[...] = values
    for f in component.fields:
        for layer in range(len(component.layers)):
            view = pool.typed(f.name, layer)
            assert view.dtype == getattr(torch, f.dtype)
            assert view.shape == (SLOTS, component.entries(PAGE), f.heads, f.width)
            assert view.element_size() == f.itemsize
            got = view.contiguous().view(torch.uint8).numpy().reshape(-1)
            assert np.array_equal(got, made[f.name][:, layer].reshape(-1))


def test_half_the_bytes_of_a_packed_payload() -> None:
    """By hand: 4 tokens x 2 heads x (16 + 12 elements at 4 bits, 2 + 2 bytes of bf16 scales) x 2 layers."""
    assert COMPONENTS["4 bit and bf16 scales"].page_bytes(4) == 4 * 2 * ((16 + 12) // 2 + 2 + 2) * 2
    assert COMPONENTS["fp8 and fp32 scales"].page_bytes(4) == 4 * 2 * (16 + 12 + 4 + 4) * 3
