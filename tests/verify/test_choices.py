"""Which cells run: every pair of choices in few of them, what cannot run with its reason; and the command's words for bad input."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from dataclasses import astuple
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hicache_ray.cli import app
from hicache_ray.config import choices as values_of
from hicache_ray.errors import ConfigError
from hicache_ray.verify.choices import Choices, choices
from hicache_ray.verify.result import Cell, Check, Result, Verdict


def pairs(cells: list[Cell]) -> set[tuple[int, str, int, str]]:
    return {(i, a, j, b) for c in cells for (i, a), (j, b) in itertools.combinations(enumerate(astuple(c)), 2)}


def test_every_pair_of_choices_is_in_a_cell() -> None:
    chosen = choices({})
    product, few = chosen.product(), chosen.pairs()
    sizes = sorted(len(values) for values in chosen.axes.values())
    assert len(product) == math.prod(sizes)
    # No fewer can do, and greed needs hardly more.
    assert sizes[-1] * sizes[-2] <= len(few) <= sizes[-1] * sizes[-2] * 5 // 4
    assert set(few) <= set(product)
    assert pairs(few) == pairs(product)


def test_more_choices_need_few_more_cells() -> None:
    """As on a machine with two io backends, and a version with three write policies."""
    axes = {"layout": "abcd", "io_backend": "xy", "write_policy": "tsb", "tier": "1234"}
    wide = Choices(axes, {})
    assert len(wide.product()) == 96
    assert pairs(wide.pairs()) == pairs(wide.product())
    assert len(wide.pairs()) <= 20


def test_what_cannot_run_here_is_listed_with_the_reason() -> None:
    not_run = choices({}).not_run
    kernel = '--io-backend is "kernel", which cannot run with layout "layer_first" on device "cpu"; choose one of auto, direct'
    assert not_run["io_backend kernel"] == kernel
    assert set(not_run) == {"io_backend kernel"}


@pytest.mark.parametrize(("axis", "value", "words"), [
    ("layout", "paged", '--layout is "paged"; choose one of layer_first, page_first, page_first_direct, page_head'),
    ("tier", "disk", '--tier is "disk"; choose one of device, host, storage, other replica'),
    ("io_backend", "kernel", '--io-backend is "kernel", which cannot run with layout'),
])  # fmt: skip
def test_a_choice_that_was_asked_for_and_cannot_run_is_refused(axis: str, value: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        choices({axis: [value]})
    assert choices({"tier": ["host"]}).axes["tier"] == ["host"]


def test_a_result_passes_when_something_ran_and_nothing_failed() -> None:
    cell = Cell("page_head", "direct", "write_back", "host")
    good, bad = Check("llama", "restore", Verdict.PASSED, cell=cell), Check("llama", "restore", Verdict.FAILED, "", ("it is off",), cell)
    assert not Result(16, 64, "float32").passed
    assert Result(16, 64, "float32", [good]).passed
    failed = Result(16, 64, "float32", [good, bad])
    assert not failed.passed
    assert failed.problems == ("llama, restore (page_head, direct, write_back, host): it is off",)
    assert json.loads(json.dumps(failed.to_json()))["problems"] == list(failed.problems)


@pytest.mark.model
@pytest.mark.parametrize(("arguments", "words"), [
    ([], "name a family or a folder with --model, or verify all families with --all"),
    (["--model", "lama"], 'model type "lama" is not known; choose one of qwen3, '),
    (["--model", "mamba"], 'model type "mamba" is refused: its upstream code ignores the cached state'),
    (["--model", "llama", "--model", "lama"], 'model type "lama" is not known'),
    (["--model", "./nowhere"], '--model is "./nowhere", and there is no such folder'),
    (["--model", "."], 'is ".", which holds no config.json; give the folder of a saved model'),
    (["--model", "llama", "--io-backend", "kernel"], '--io-backend is "kernel", which cannot run with'),
    (["--model", "llama", "--grid", "40"], "--grid is 40; it must be a multiple of --page-size (16)"),
    (["--model", "llama", "--directory", "./nowhere"], '--directory is "./nowhere", which is not a folder'),
    (["--model", "llama", "--dtype", "float8"], '--dtype is "float8"; choose one of float32, bfloat16'),
])  # fmt: skip
def test_bad_input_gets_a_sentence(arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["verify", *arguments])
    assert done.exit_code == 2, done.output
    assert words in " ".join(done.stderr.split())
    assert done.stdout == ""


@pytest.mark.model
def test_a_folder_is_verified_as_a_user_does_it(tmp_path: Path) -> None:
    """A process of its own: the saved model of a user, two tiers, JSON on stdout, tables and progress on stderr."""
    from hicache_ray.integrations.transformers import make_weights

    folder = make_weights("qwen3_5", tmp_path / "model")
    command = [sys.executable, "-m", "hicache_ray.cli", "verify", "--model", str(folder), "--tier", "host", "--tier", "other replica"]
    done = subprocess.run(
        [*command, "--layout", "page_head", "--page-size", "32", "--json", "-"], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert (result["passed"], result["page_size"], result["grid"], result["problems"]) == (True, 32, 128, [])
    assert {c["model"] for c in result["checks"]} == {str(folder)}
    cells = [tuple(c["cell"].values()) for c in result["checks"] if c["cell"]]
    policies, tiers = values_of("cache.write_policy"), ("host", "other replica")
    assert sorted(cells) == sorted(("page_head", "direct", p, t) for p in policies for t in tiers)
    assert "branching" in done.stderr
    assert "all checks passed" in done.stderr
    assert "not run: io_backend kernel" in done.stderr
