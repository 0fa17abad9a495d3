"""Replaying traces: known hits of hand-made ones, the generated one, tiers, what is wrong with a file, the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.make_trace import requests
from hicache_ray.cli import app
from hicache_ray.errors import ConfigError
from hicache_ray.replay import Replay, Sizes, replay
from hicache_ray.settings import Eviction
from hicache_ray.trace import Traced, ceiling, parse, read

SMALL = Path(__file__).parent.parent / "benchmarks" / "small_trace.jsonl"
#: Of the generated trace, with 300 blocks: hit blocks of 5,285, of which 3,603 can be hits.
REACHED = {"lru": 3174, "lfu": 3394, "s3fifo": 3439, "priority": 3174}


def prompt(*blocks: int, tail: int = 10) -> Traced:
    """Whole blocks of 512 tokens and ``tail`` tokens more, which are a block of their own."""
    return Traced(0.0, 512 * len(blocks) + tail, 1, (*blocks, 10**6 + blocks[-1]) if tail else blocks)


def hits(traced: list[Traced], policy: str = "lru", capacity: int | None = None) -> list[int]:
    one = Replay(policy, Sizes(capacity), ceiling(traced))
    out = []
    for request in traced:
        out.append(one.request(request))
        one.group.check()
    return out


def test_a_hit_is_a_run_of_whole_blocks_from_the_root() -> None:
    assert hits([prompt(1, 2, 3), prompt(1, 2, 3), prompt(1, 2, 9), prompt(8, 2, 3), prompt(1, 2, 9, 4)]) == [0, 3, 2, 0, 3]


def test_one_token_is_always_computed_and_partial_blocks_are_not_kept() -> None:
    assert hits([prompt(1, 2, tail=0), prompt(1, 2, tail=0), prompt(1, 2), prompt(1, 2)]) == [0, 1, 2, 2]


def test_the_least_recently_used_prompt_goes_and_its_deep_end_first() -> None:
    # Room for 8: the third prompt (3 blocks and a partial one) takes the deep end of the first.
    assert hits([prompt(1, 2, 3), prompt(4, 5, 6), prompt(7, 8, 9), prompt(1, 2, 3)], capacity=8)[-1] == 1
    assert hits([prompt(1, 2, 3), prompt(4, 5, 6), prompt(7, 8, 9), prompt(4, 5, 6)], capacity=8)[-1] == 3


def test_a_prompt_longer_than_the_device_is_refused_and_counts_as_missed() -> None:
    result = replay([prompt(1, 2, 3), prompt(*range(10, 20)), prompt(1, 2, 3)], sizes=Sizes(5))
    assert (result.refused, result.tiers["device"], result.blocks) == (1, 3, 4 + 11 + 4)


@pytest.mark.parametrize("policy", Eviction)
def test_the_generated_trace(policy: str) -> None:
    """Nothing in a trace has a priority: where all have the same, that policy is the plain one."""
    traced = read(str(SMALL))
    assert ceiling(traced).hits == 3603
    assert sum(replay(traced, policy, Sizes(300)).tiers.values()) == REACHED[policy]


def test_without_bound_the_core_reaches_the_ceiling_also_through_storage() -> None:
    traced = read(str(SMALL))[:120]
    most = ceiling(traced).hits
    assert replay(traced).tiers == {"device": most, "host": 0, "storage": 0}
    tiers = replay(traced, sizes=Sizes(70, 70, storage=True)).tiers
    assert sum(tiers.values()) == most
    assert min(tiers.values()) > 0


def test_the_file_is_what_its_generator_makes() -> None:
    assert [json.loads(line) for line in SMALL.read_text().splitlines()] == list(requests())


GOOD = '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [0, 1]}'


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "line 2 of trace: this is not JSON"),
        ("[" * 100_000, "nested too deep"),
        ("1" * 5000, "a number in it is too long"),
        (GOOD.replace("[0, 1]", f"[0, {'9' * 5000}]"), "a number in it is too long"),
        (GOOD.replace('"timestamp": 0', f'"timestamp": {"1" * 400}'), f"timestamp is {'1' * 40}...; it must be milliseconds"),
        (GOOD.replace('"timestamp": 0', '"timestamp": Infinity'), "timestamp is Infinity"),
        (GOOD.replace("600", "9" * 400), f"input_length is {'9' * 40}...; it must be a whole number of tokens, from 1 to 67108864"),
        (GOOD.replace('"output_length": 1', '"output_length": 1e3'), "output_length is 1000.0"),
        ("[1]", "line 2 of trace: this is no request of a trace in Mooncake's format"),
        ('{"prompt": "x"}', "it lacks timestamp, input_length"),
        (GOOD.replace("[0, 1]", "[0]"), "line 2 of trace: 600 tokens are 2 blocks of 512 tokens and hash_ids has 1"),
        (GOOD.replace("[0, 1]", '[0, "a"]'), "hash_ids must be a list of whole numbers"),
        (GOOD.replace("600", "0"), "input_length is 0"),
        (GOOD.replace('"timestamp": 0', '"timestamp": -1'), "timestamp is -1"),
    ],
)
def test_a_broken_line_is_named(line: str, told: str) -> None:
    with pytest.raises(ConfigError, match=r".*") as raised:
        list(parse([GOOD, line]))
    assert told in str(raised.value)
    assert "line 2 of trace" in str(raised.value)


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["replay", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_the_command_tells_ratios_and_draws(tmp_path: Path) -> None:
    file, picture = tmp_path / "trace.jsonl", tmp_path / "replay.png"
    file.write_text("\n".join(SMALL.read_text().splitlines()[:60]))
    code, out, err = run(str(file), "--capacity", "80,200", "--policy", "lru,priority", "--json", "-", "--plot", str(picture))
    assert code == 0, err
    told = json.loads(out)
    assert [(r["policy"], r["capacity"]) for r in told["runs"]] == [("lru", 80), ("priority", 80), ("lru", 200), ("priority", 200)]
    assert told["hit_ratio"] == told["runs"][0]["hit_ratio"] == told["tiers"]["device"]
    assert 0 < told["hit_ratio"] < told["runs"][2]["hit_ratio"] <= told["ceiling"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "can be hits" in err


def test_the_command_needs_no_capacity_and_then_reaches_the_ceiling(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(SMALL.read_text().splitlines()[:60]))
    code, out, _ = run(str(file), "--json", "-")
    told = json.loads(out)
    assert (code, told["hit_ratio"]) == (0, told["ceiling"])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nothing.jsonl"], "the trace nothing.jsonl cannot be read: No such file or directory"),
        ([str(SMALL), "--storage"], "pages come to storage (--storage) through a host tier"),
        ([str(SMALL), "--capacity", "many"], '--capacity is "many"'),
        ([str(SMALL), "--policy", "mru"], '--policy has "mru"; choose some of lru,lfu,s3fifo,priority'),
    ],
)
def test_what_is_wrong_is_a_sentence(arguments: list[str], told: str) -> None:
    code, _, err = run(*arguments)
    assert code == 2
    assert told in err
