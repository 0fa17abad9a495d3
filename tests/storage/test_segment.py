"""Shared memory and the directories it lives in."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hicache_ray.errors import ConfigError, StoreError
from hicache_ray.storage import ArenaClient, ArenaConfig, ArenaService, sweep
from hicache_ray.storage.descriptors import Loan
from hicache_ray.storage.owned import PREFIX, OwnedDirectory
from hicache_ray.storage.segment import Segment, data_offset
from hicache_ray.storage.slabs import BLOCK
from tests.storage.objects import get, put
from tests.storage.services import PATIENCE_S, Process


def test_both_mappings_show_the_same_bytes_and_words(tmp_path: Path) -> None:
    ours = Segment.create(tmp_path / "segment", 8 * BLOCK)
    theirs = Segment.open(tmp_path / "segment", 8 * BLOCK)
    ours.data[BLOCK : BLOCK + 3] = [1, 2, 3]
    ours.generations[1] = 7
    assert bytes(theirs.arrow.slice(BLOCK, 3)) == b"\x01\x02\x03"
    assert theirs.unchanged(Loan(BLOCK, BLOCK, checksum=0, generation=7))
    assert not theirs.unchanged(Loan(BLOCK, BLOCK, checksum=0, generation=6))
    assert theirs.unchanged(Loan(BLOCK + 64, 64, checksum=0, generation=6))  # small objects share words
    assert not theirs.arrow.is_mutable
    assert theirs.data.nbytes == theirs.arrow.size == 8 * BLOCK
    assert (tmp_path / "segment").stat().st_size == data_offset(8 * BLOCK) + 8 * BLOCK


def test_prefaulting_changes_nothing(tmp_path: Path) -> None:
    segment = Segment.create(tmp_path / "segment", 1024 * BLOCK)
    segment.data[:] = 5
    segment.prefault(2)
    segment.wait_prefaulted()
    assert (segment.data == 5).all()
    segment.close()


def test_a_segment_that_is_gone_or_short_is_an_error_not_a_crash(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be opened"):
        Segment.open(tmp_path / "segment", BLOCK)
    (tmp_path / "segment").write_bytes(b"short")
    with pytest.raises(StoreError, match="shorter than its service says"):
        Segment.open(tmp_path / "segment", BLOCK)


def test_too_little_room_is_refused_before_anything_is_created(config: ArenaConfig) -> None:
    with pytest.raises(ConfigError, match=r"/dev/shm has room for [\d,.]+ MiB.*needs [\d,]+.0 MiB.*storage.size.*storage.directory"):
        ArenaService(replace(config, size_bytes=1 << 60, slab_bytes=None)).start()
    with pytest.raises(ConfigError, match="storage.directory /nowhere cannot be used"):
        ArenaService(replace(config, directory="/nowhere")).start()


def test_an_arena_in_files(config: ArenaConfig, tmp_path: Path) -> None:
    with ArenaService(replace(config, directory=str(tmp_path))) as service:
        client = ArenaClient(service.address)
        assert put(client, [1, 2]) == 0b11
        assert get(client, [1, 2]) == {1, 2}
        client.close()
        assert len(list(tmp_path.iterdir())) == 2
    assert list(tmp_path.iterdir()) == []


def test_the_socket_may_live_elsewhere(config: ArenaConfig, tmp_path: Path) -> None:
    with ArenaService(replace(config, socket_dir=str(tmp_path))) as service:
        assert Path(service.address.socket).parent.parent == tmp_path
        assert Path(service.address.socket).parent.stat().st_mode & 0o777 == 0o700
        assert service.arena.segment.path.parent.parent == Path("/dev/shm")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"name": "a/b"}, "storage.name"),
        ({"size_bytes": 0}, "storage.size_bytes must be positive"),
        ({"prefault": "maybe"}, "background, start, off"),
        ({"socket_dir": "/tmp/" + "x" * 100}, "set storage.socket_dir to a short one"),
    ],
)
def test_bad_settings_are_named(config: ArenaConfig, change: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        replace(config, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize("prefault", ["start", "background", "off"])
def test_prefault_settings(config: ArenaConfig, prefault: str) -> None:
    with ArenaService(replace(config, prefault=prefault)) as service:
        client = ArenaClient(service.address)
        assert put(client, [1]) == 1
        client.close()


def test_a_name_has_one_living_owner(config: ArenaConfig, service: ArenaService) -> None:
    with pytest.raises(ConfigError, match="belongs to a store that is running"):
        ArenaService(replace(config, start_timeout_s=0.0)).start()
    assert Path(service.address.socket).exists()


def test_sweep_removes_the_dead_and_spares_the_living(tmp_path: Path) -> None:
    living = OwnedDirectory.create(tmp_path, "living")
    dead = tmp_path / (PREFIX + "dead")
    dead.mkdir()
    (dead / "segment-0").write_bytes(b"x")
    (tmp_path / (PREFIX + "file")).write_bytes(b"")
    (tmp_path / "somebody-elses").mkdir()
    assert sweep(tmp_path) == [PREFIX + "dead"]
    assert {path.name for path in tmp_path.iterdir()} == {PREFIX + "living", PREFIX + "file", "somebody-elses"}
    living.close()
    living.close()
    assert not living.path.exists()


def test_a_lock_is_not_inherited_by_programs_that_the_owner_starts(tmp_path: Path) -> None:
    program = (
        "import pathlib, subprocess, sys; from hicache_ray.storage.owned import OwnedDirectory;"
        "OwnedDirectory.create(pathlib.Path(sys.argv[1]), 'x');"
        "child = subprocess.Popen([sys.executable, '-c', 'import sys; sys.stdin.read()'], close_fds=False); print(child.pid)"
    )
    owner = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.wait(PATIENCE_S) == 0
    assert sweep(tmp_path) == [PREFIX + "x"]
    owner.communicate(timeout=PATIENCE_S)  # ends the child too: it reads the same standard input


def test_what_a_killed_service_left_is_swept_by_the_next(config: ArenaConfig) -> None:
    first = Process(config)
    first.kill()
    left = {path.name for path in Path("/dev/shm").glob(f"{PREFIX}{config.name}*")}
    assert left == {PREFIX + config.name, f"{PREFIX}{config.name}-{first.address.incarnation}"}
    with ArenaService(config) as service:
        assert service.address.incarnation != first.address.incarnation
        assert service.address.socket == first.address.socket
        assert not (Path("/dev/shm") / f"{PREFIX}{config.name}-{first.address.incarnation}").exists()
