"""T037: replicated KV is stored once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from hicache_ray.spec import Field
from hicache_ray.storage import ArenaClient, ArenaConfig, ArenaService
from hicache_ray.storage.faults import FaultyStore
from hicache_ray.testing import Stack, full

LATENT = {"latent": full(shard="replicated", fields=(Field("c", 1, 36),))}


def test_t037_replicated_kv_is_stored_once() -> None:
    stack = Stack(page=64, pools=LATENT, ranks=8)
    prompt = list(range(1, 642))
    stack.put(prompt)
    stack.settle()
    assert stack.store is not None
    objects = list(stack.store.scan())
    assert len(objects) == len(set(objects)) == 10
    for rank in range(8):
        assert stack.have("l3", "latent", prompt, rank) == set(range(10))
    # More than one rank has written: each page by one of them.
    stack.flush()
    assert stack.put(prompt).l3 == 640
    for rank in range(8):
        assert stack.read(prompt, "latent", rank) == stack.made(prompt, "latent", rank)
    stack.settle()
    stack.audit()

    # The ranks are gone, with whatever each had written; the store has all ten. Any group of any size can read them.
    for ranks in (8, 2):
        other = Stack(page=64, pools=LATENT, ranks=ranks, store=stack.store)
        assert other.probe(prompt).l3 == 640
        assert other.put(prompt).l3 == 640
        assert all(other.read(prompt, "latent", rank) == stack.made(prompt, "latent") for rank in range(ranks))
        other.settle()
    assert len(list(stack.store.scan())) == 10


#: A group of 8 ranks that has written and is then killed; it has no time to say goodbye.
WRITER = """
import os, signal, sys
from hicache_ray.storage import ArenaClient
from hicache_ray.storage.faults import FaultyStore
from hicache_ray.testing import Stack
from tests.cases.test_t037_replicated import LATENT
stack = Stack(page=64, pools=LATENT, ranks=8, store=FaultyStore(ArenaClient(sys.argv[1])))
stack.put(range(1, 642))
stack.settle()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_t037_killing_the_writer_does_not_lose_what_it_wrote(tmp_path: Path) -> None:
    prompt = list(range(1, 642))
    with ArenaService(ArenaConfig("t037", 1 << 24, str(tmp_path))) as service:
        at = service.address.to_dict()["socket"]
        done = subprocess.run([sys.executable, "-c", WRITER, at], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == -9, done.stderr
        client = ArenaClient(at)
        try:
            assert len(list(client.scan())) == 10
            reader = Stack(page=64, pools=LATENT, ranks=8, store=FaultyStore(client))
            assert reader.put(prompt).l3 == 640
            for rank in range(8):
                assert reader.have("l3", "latent", prompt, rank) == set(range(10))
                assert reader.read(prompt, "latent", rank) == reader.made(prompt, "latent", rank)
            reader.settle()
            reader.audit()
        finally:
            client.close()
