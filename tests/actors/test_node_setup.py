"""From the configuration to the settings of a node's storage, and what a machine cannot do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hicache_ray.actors import model
from hicache_ray.actors.cluster import Cluster
from hicache_ray.actors.gateway import GatewaySetup
from hicache_ray.actors.messages import GroupSetup
from hicache_ray.actors.setup import (
    Here,
    Prepared,
    check_disk,
    fitted_on_node,
    host_bytes,
    namespace_of,
    node_config,
    tenant_namespaces,
)  # fmt: skip
from hicache_ray.config import Config
from hicache_ray.config_sources import FileText, changed, load
from hicache_ray.errors import ConfigError, HiCacheError
from hicache_ray.sizing import Memory
from hicache_ray.spec import CacheSpec
from hicache_ray.testing import full

SPEC = CacheSpec("test", 64, (full(),), 1)
NODE = Here("0123456789abcdef" * 3, "10.0.0.7", "", {"rack": "r7"})


def config(**flags: Any) -> Config:
    return load(flags={"storage.size": "1MiB", **{f"storage.{name}": value for name, value in flags.items()}}).config


def test_a_node_has_names_of_its_own_and_is_reached_where_it_is_told() -> None:
    made = node_config(config(), NODE, "secret")
    assert (made.node, made.arena.name) == (NODE.node, "hicache-storage-01234567")
    assert (made.host, made.port, made.streams, made.flight_port) == ("127.0.0.1", 0, 2, None)
    assert (made.label, made.disk) == (NODE.node, None)  # each node is a failure domain of its own
    assert (made.shard.placement, made.shard.replicas, made.arena.pending_bytes) == ("writer", 1, None)
    assert "secret" not in repr(made)
    far = config(host="auto", port=7070, streams=4, flight_port=0, label="rack", placement="home", replicas=2, workers=3)
    made = node_config(far, NODE, "secret")
    assert (made.host, made.port, made.streams, made.flight_port, made.label) == ("10.0.0.7", 7070, 4, 0, "r7")
    assert (made.shard.placement, made.shard.replicas, made.shard.workers) == ("home", 2, 3)
    assert node_config(config(label="zone"), NODE, "secret").label == NODE.node  # it carries no such label
    assert changed(far, {}) == far  # every setting survives the way through plain values


def test_no_secret_is_shown_by_accident() -> None:
    flags = {"namespace.salt": "a-secret-salt", "tenants.acme.salt": "a-secret-salt", "tenants.acme.key": "a-secret-key"}
    made = load(flags=flags).config
    base = namespace_of(made, "a model")
    spaces = tenant_namespaces(made, base)
    gateway = GatewaySetup("app", "store", {}, "127.0.0.1", 8401, "a-secret-token")
    running = Cluster(made, Prepared("folder", SPEC, "a model"), token="a-secret-token")
    setup = GroupSetup(made, SPEC, base, "socket", spaces)
    for shown in (made, base, spaces, gateway, running, setup):
        assert "a-secret" not in repr(shown)
    assert (gateway.token, running.token, base.salt) == ("a-secret-token", "a-secret-token", "a-secret-salt")


def test_a_replica_takes_what_its_own_node_has() -> None:
    """The machine that started it may be another one, and larger."""
    unit, prepared = 1 << 20, Prepared("folder", SPEC, "a model")
    ratio = load(flags={"cache.host_reserve": "1MiB", "model.tp": 2}).config
    wanted = host_bytes(ratio, SPEC)
    assert fitted_on_node(ratio, prepared, Memory(64 * wanted, 64 * wanted)) == ratio
    small = fitted_on_node(ratio, prepared, Memory(64 * wanted, wanted + unit))
    assert small.cache.host_size == int(wanted * 0.8) // 2  # by cache.host_fraction, for each of two ranks
    assert fitted_on_node(ratio, replace(prepared, fitted=True), Memory(unit, unit)) == ratio  # they share the machine that was measured
    told = load(flags={"cache.host_reserve": "1MiB", "cache.host_size": "8MiB", "model.tp": 2}).config
    assert fitted_on_node(told, prepared, Memory(64 * unit, 17 * unit)) == told
    with pytest.raises(ConfigError, match=r"on node .+: cache.host_size is 8MiB for each of 2 rank\(s\) .*; choose at most 8388607"):
        fitted_on_node(told, prepared, Memory(64 * unit, 17 * unit - 1))
    with pytest.raises(ConfigError, match=r"on node .+: this node has 1,048,576 bytes free"):
        fitted_on_node(ratio, prepared, Memory(64 * unit, unit))


def test_limits_reach_the_arena() -> None:
    text = FileText("tier.yaml", "tenants: {acme: {salt: a-long-salt, max_bytes: 64KiB}, zenith: {salt: another-salt}}")
    flags = {"storage.size": "1MiB", "storage.pending": "128KiB", "storage.huge_pages": "off", "storage.write_behind": "32KiB"}
    made = node_config(load(text, flags=flags).config, NODE, "secret")
    assert made.arena.tenant_bytes == {"acme": 64 << 10}
    assert (made.arena.pending_bytes, made.arena.huge_pages, made.write_behind_bytes) == (128 << 10, "off", 32 << 10)
    assert node_config(config(), NODE, "secret").write_behind_bytes == 256 << 10
    settings = (config(), config(repair_rate="1MiB"), config(repair_rate="0"))
    rates = [node_config(made, NODE, "secret").repair.bytes_per_s for made in settings]
    assert rates == [64 << 20, 1 << 20, 0]


def test_a_node_finds_its_folder_on_disk_again(tmp_path: Path) -> None:
    wanted = config(disk_path=str(tmp_path), disk_size="4MiB", fsync="always", direct="off")
    disk = node_config(wanted, NODE, "secret").disk
    assert disk is not None
    assert (disk.directory, disk.size_bytes, disk.fsync, disk.direct) == (str(tmp_path / "hicache-storage"), 4 << 20, "always", "off")
    assert Path(disk.directory).stat().st_mode & 0o777 == 0o700
    again = node_config(wanted, Here("f" * 48, "10.0.0.7"), "secret").disk
    assert again == disk  # also when Ray has given the machine another id
    named = node_config(wanted, Here("f" * 48, "10.0.0.7", "left/1"), "secret").disk
    assert named is not None
    assert Path(named.directory) == tmp_path / "hicache-storage-left_1"  # two nodes on one machine have names


def test_a_disk_that_cannot_be_used_is_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for path in (tmp_path / "nowhere", file):
        with pytest.raises(ConfigError, match=f'storage.disk_path is "{path}", which is not a folder on .*; make it, or choose another'):
            check_disk(config(disk_path=str(path)))
    assert check_disk(config()) is None
    with pytest.raises(ConfigError, match=r"storage.disk_size is 900TiB and .* has .* for it; lower it"):
        node_config(config(disk_path=str(tmp_path), disk_size="900TiB"), NODE, "secret")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"pending": "2MiB"}, "storage.pending is 2097152; it must be at most storage.size (1048576), in which those bytes lie"),
        ({"write_behind": "2MiB"}, "storage.write_behind is 2097152; it must be at most storage.size (1048576), in which those bytes lie"),
        ({"port": 7070, "flight_port": 7070}, "storage.flight_port is 7070, and so is storage.port; choose different ports"),
        ({"disk_path": "pages"}, 'storage.disk_path is "pages"; every node opens it by itself, so write the whole path, from / on'),
        ({"host": ""}, "storage.host is empty; write an address of the node, or auto"),
        ({"name": "n" * 32}, f'storage.name is "{"n" * 32}"; use at most 31 characters, because the name of a node is added'),
        ({"replicas": 3}, "storage.replicas is 3; it must be at most 2 (set by flag --storage-replicas)"),
        ({"workers": 1}, "storage.workers is 1; it must be at least 2 (set by flag --storage-workers)"),
        ({"placement": "far"}, 'storage.placement is "far"; choose one of writer, home (set by flag --storage-placement)'),
        ({"port": 65536}, "storage.port is 65536; it must be at most 65535 (set by flag --storage-port)"),
    ],
)
def test_what_does_not_fit_together_is_a_sentence(flags: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**flags)
    assert str(caught.value) == sentence


def test_a_model_that_takes_too_long_to_prepare_is_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(model, "PREPARE_S", 0.001)
    with pytest.raises(HiCacheError, match=rf"the model could not be prepared within 0.001 s; is the disk of {tmp_path} slow\?"):
        model.read_spec(config(), str(tmp_path))
