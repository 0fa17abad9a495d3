"""``hicache-ray size``: arithmetic that a person can check, from a spec in a file or a model's configuration."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hicache_ray.cli import app
from hicache_ray.spec import CacheSpec, Component, Field, Kind

KV = (Field("k", 2, 64), Field("v", 2, 64))  # 512 bytes a token and layer
SPEC = CacheSpec(
    "made up", 64, (Component("full", Kind.FULL, KV, (0, 1)), Component("state", Kind.STATE, (Field("s", 1, 4096, 4),), (2,))), 2
)


@pytest.fixture
def spec(tmp_path: Path) -> str:
    (tmp_path / "spec.json").write_text(json.dumps(asdict(SPEC)))
    return str(tmp_path / "spec.json")


def size(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["size", *words])
    return done.exit_code, done.output


def test_numbers_from_a_spec(spec: str) -> None:
    code, text = size("--spec", spec, "--json", "--prompt-tokens", "1024", "--device-memory", "64MiB", "--host-memory", "5GiB",
                      "--ranks-per-node", "2", "--host-reserve", "1GiB", "--host-fraction", "0.5")  # fmt: skip
    assert code == 0, text
    told = json.loads(text)
    full, state = told["rows"]
    assert (full["per_token"], full["per_snapshot"]) == (1024.0, 0)
    assert (state["per_token"], state["per_snapshot"]) == (0.0, 16384)
    # A prompt of 1,024 tokens: 16 pages of 64 KiB and 4 snapshots of 16 KiB, 17 parts of 64 KiB.
    unit = 16 * 65536 + 4 * 16384
    assert told["budget"]["host"] == 2 << 29
    units = (1 << 30) / unit
    assert (full["host_slots"], state["host_slots"]) == (int(16 * units), int(4 * units))
    device = ((64 << 20) - 2 * 16384) / unit
    assert (full["device_slots"], state["device_slots"]) == (int(16 * device), int(4 * device) + 2)
    assert told["device_tokens"] == 64 * int(16 * device)
    assert told["largest"]["host"] == int(16 * units) * 64 // 256 * 256
    assert told["warnings"] == []


def test_warnings_and_a_table(spec: str) -> None:
    code, text = size("--spec", spec, "--prompt-tokens", "1024", "--device-memory", "1GiB", "--host-memory", "1.5GiB", "--grid", "64",
                      "--track-interval", "64")  # fmt: skip
    assert code == 0, text
    assert "beware:  the host pools" in text
    assert "device:  1.00 GiB a rank" in text
    assert "host:    204.77 MiB a rank, 409.53 MiB for 2 rank(s)" in text
    assert "storage: 0.50 GiB a node" in text
    assert "smaller than the device's" in text
    assert "--host-size" in text


def test_what_does_not_fit_is_refused(spec: str) -> None:
    code, text = size("--spec", spec, "--host-memory", "4GiB", "--host-size", "4GiB")
    assert (code, "choose at most" in text) == (2, True)
    assert size("--spec", spec, "--host-memory", "many")[0] == 2
    for words, told in (
        (("--device-memory", "0"), "--device-memory is '0': it must be more than 0 bytes"),
        (("--device-memory", "1000"), "the 1,000 bytes of a rank's device pools hold no prompt at all; one of 256 tokens takes 311,296"),
        (("--host-memory", "2GiB", "--host-reserve", "2GiB"), "this node has 2,147,483,648 bytes free (--host-memory), no more than"),
        (("--host-memory", "4GiB", "--host-size", "64KiB"), "the 65,536 bytes of a rank's host pools hold no prompt at all"),
        (("--prompt-tokens", "10"), "prompts of up to 10 tokens leave nothing to restore; plan for at least 256 tokens"),
        (("--prompt-tokens", str(10**23)), f"prompts of {10**23} tokens are longer than any model runs; plan for at most 67108864"),
    ):
        code, text = size("--spec", spec, *words)
        assert (code, told in " ".join(text.split())) == (2, True), text
    assert size("--spec", spec + ".not")[0] == 2
    assert size("--spec", spec, "--no-such-flag", "1")[0] == 2
