"""Settings as flags, refusals as sentences, tables: the command line without a tier behind it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hicache_ray import cli, cli_flags
from hicache_ray.config import settings
from hicache_ray.config_sources import flag_name
from hicache_ray.errors import ConfigError


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands prepare the environment for Ray; undo that."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_USAGE_STATS_ENABLED"):
        monkeypatch.setenv(name, os.environ.get(name, "disabled"))


def run(*args: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli.app, list(args))
    return result.exit_code, result.stdout, result.stderr


def test_every_setting_is_a_flag() -> None:
    names = {name: flag_name(name) for name in settings()}
    assert len(set(names.values())) == len(names)
    assert cli_flags.parse([x for name in names for x in (names[name], "1")]) == dict.fromkeys(names, "1")


def test_both_spellings_of_a_value() -> None:
    assert cli_flags.parse(["--layout", "page_head", "--storage-size=1GiB"]) == {"cache.layout": "page_head", "storage.size": "1GiB"}


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--layuot", "page_head"], r"there is no flag --layuot; did you mean --layout\?"),
        (["--zzz"], "there is no flag --zzz; see hicache-ray serve --print-config for all settings"),
        (["--layout"], r"--layout needs a value \(cache.layout\)"),
        (["page_head"], "there is no flag page_head"),
    ],
)
def test_unknown_flags_are_refused_with_what_to_do(args: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        cli_flags.parse(args)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--model", "gpt9"), ["gpt9", "qwen3_5_text", "gemma3_text"]),
        (("--model", "jamba"), ["jamba", "refused", "ignores the cached state"]),
        (("--layout", "diagonal"), ["cache.layout", "diagonal", "page_first_direct", "layer_first", "page_head"]),
        (("--write-policy", "sometimes"), ["cache.write_policy", "write_through", "write_back"]),
        (("--io-backend", "kernel"), ["cache.io_backend", "kernel", "choose one of auto, direct"]),
        (("--grid", "100"), ["cache.grid is 100", "cache.page_size (64)", "64 or 128"]),
        (("--page-size", "48"), ["cache.grid is 256", "cache.page_size (48)", "240 or 288"]),
        (("--storage-size", "900TiB"), ["storage.size is", "free", "storage.directory"]),
        (("--storage-directory", "/nowhere/at/all"), ["storage.directory", "not a folder"]),
        (("--storage-backend", "none"), ["storage.backend is none"]),
        (("--prompt-tokens", "256"), ["--prompt-tokens is 256", "at least 257"]),
        (("--prompt-tokens", "0"), ["--prompt-tokens is 0"]),
        (("--config", "/nowhere.yaml"), ["/nowhere.yaml cannot be read"]),
    ],
)
def test_bad_input_is_a_sentence_before_anything_starts(args: tuple[str, ...], words: list[str]) -> None:
    code, out, err = run("probe", *args)
    said = re.sub(r"\s+", " ", err)
    assert code == 2, said
    assert out == ""
    for word in words:
        assert word in said, said
    assert "Traceback" not in said
    assert "starting Ray" not in said


def test_print_config_shows_values_with_their_origins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tier.yaml"
    file.write_text("cache:\n  page_size: 32\nnamespace:\n  salt: s3cret-salt\n")
    monkeypatch.setenv("HICACHE__STORAGE__SIZE", "1GiB")
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = run("serve", "--print-config", "--config", str(file), "--grid", "512")
    rows = [[cell.strip() for cell in line.strip("│┃ ").split("│")] for line in out.splitlines()]
    lines = {row[0]: row[1:] for row in rows if len(row) == 3}
    assert code == 0
    assert lines["cache.page_size"] == ["32", f"file {file}"]
    assert lines["storage.size"] == ["1GiB", "env HICACHE__STORAGE__SIZE"]
    assert lines["cache.grid"] == ["512", "flag --grid"]
    assert lines["cache.layout"] == ["page_first_direct", "default"]
    assert "s3cret" not in out


def test_admin_commands_say_where_nobody_answers() -> None:
    for command in (("status",), ("stats",), ("flush",), ("drop", "acme"), ("storage", "detach")):
        code, _, err = run(*command, "--url", "http://127.0.0.1:9")
        assert code == 2
        assert "no admin endpoint answers at http://127.0.0.1:9" in re.sub(r"\s+", " ", err)


def test_help_costs_neither_ray_nor_torch() -> None:
    script = (
        "import sys, json; from hicache_ray import cli; from typer.testing import CliRunner;"
        "r = CliRunner().invoke(cli.app, ['--help']); print(json.dumps([r.exit_code, sorted({'ray', 'torch'} & set(sys.modules))]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == [0, []]


@pytest.mark.parametrize("command", [("probe",), ("demo",), ("verify", "--model", "llama"), ("replay", "benchmarks/small_trace.jsonl")])
def test_a_result_that_cannot_be_written_is_refused_before_the_work(command: tuple[str, ...], tmp_path: Path) -> None:
    for target in (tmp_path / "nowhere" / "result.json", tmp_path):
        code, out, err = run(*command, "--json", str(target))
        assert (code, out) == (2, "")
        assert f"--json {target} cannot be written".replace(" ", "") in re.sub(r"\s", "", err)


@pytest.mark.parametrize(
    ("args", "variables", "sentence"),
    [
        ((), {"HICACHE__ADMIN__PORT": "many"}, 'admin.port is "many"; it must be a whole number'),
        ((), {"HICACHE__ADMIM__PORT": "1"}, "there is no setting admim.port"),
        (("--url", "http://127.0.0.1:1"), {}, "no admin endpoint answers at http://127.0.0.1:1"),
        (("--url", "http://[::1"), {}, "no admin endpoint answers at http://[::1"),
        (("--url", "nonsense"), {}, "no admin endpoint answers at nonsense"),
    ],
)
@pytest.mark.parametrize("command", [["status"], ["stats"], ["flush"], ["drop", "acme"], ["explain", "r"], ["storage", "detach"]], ids=str)
def test_commands_that_reach_no_tier_say_why(
    command: list[str], args: tuple[str, ...], variables: dict[str, str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    code, out, err = run(*command, *args)
    assert (code, out) == (2, "")
    assert sentence.replace(" ", "") in re.sub(r"\s", "", err)


def test_an_interrupted_simulation_ends_without_a_traceback() -> None:
    command = [sys.executable, "-m", "hicache_ray.cli", "sim", "--minutes", "10", "--case", "hybrid"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("hicache-ray sim --seed 0")  # it is under way
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "interrupted" in err
    assert "Traceback" not in err
