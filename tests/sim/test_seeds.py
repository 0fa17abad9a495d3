"""Histories that are lived at every test run: every case, and some that seeds make up. ``make soak`` lives others."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from hicache_ray import cli
from hicache_ray.flights import Envelope
from hicache_ray.records import Compute
from hicache_ray.simulate import Failed, World, simulate
from hicache_ray.simulate_cases import cases
from hicache_ray.simulate_group import Member
from hicache_ray.simulate_report import loss, measure
from hicache_ray.slots import SlotPool
from hicache_ray.storage.peers import ShardConfig

STEPS = 1200


@pytest.mark.parametrize("case", cases())
def test_every_case_holds(case: str) -> None:
    tally = simulate(1, STEPS, case)
    assert tally.events >= STEPS
    assert tally.rests >= 1
    assert tally.served > 0
    assert sum(tally.tokens.values()) > 0


@pytest.mark.parametrize("first", range(0, 16, 4))
def test_random_histories_hold(first: int) -> None:
    for seed in range(first, first + 4):
        print(f"hicache-ray sim --seed {seed} --steps {STEPS}")  # shown where the test fails
        assert simulate(seed, STEPS).served > 0


def test_histories_have_everything_in_them() -> None:
    """All kinds of faults happen, storage is used and found broken, groups are lost and come back, tokens come from every tier."""
    stormy = replace(cases()["replicas"], faults=6.0)
    small = replace(stormy, l3=(40, 80))  # what a lookup has promised may be evicted before it is read
    worlds = [World(seed, stormy if seed < 4 else small) for seed in range(8)]
    tallies = [world.run(2000) for world in worlds]
    assert set().union(*(t.faults for t in tallies)) == {call.__name__ for _, call in worlds[0].faults._kinds}
    assert sum(t.restarts for t in tallies) > 0
    assert all(sum(t.stored[what] for t in tallies) > 0 for what in ("put", "get", "miss", "bad"))
    assert all(sum(t.tokens[tier] for t in tallies) > 0 for tier in ("device", "host", "storage", "computed"))
    assert 0 < sum(t.served for t in tallies) < sum(t.requests for t in tallies)


def test_one_seed_is_one_history_in_every_process() -> None:
    told = set()
    for hashing in ("1", "2"):
        code = "from hicache_ray.simulate import simulate; print(simulate(7, 1200, 'everything'))"
        env = {**os.environ, "PYTHONHASHSEED": hashing}
        told.add(subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True, timeout=120).stdout)
    assert told == {f"{simulate(7, 1200, 'everything')}\n"}
    assert simulate(8, 1200, "everything").history != simulate(7, 1200, "everything").history


def test_a_failure_is_a_line_that_lives_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    real = SlotPool.withdraw

    def lossy(self: SlotPool, slots: object) -> None:
        real(self, slots)  # type: ignore[arg-type]
        if len(self._free) > 3:
            self._free.pop()

    monkeypatch.setattr(SlotPool, "withdraw", lossy)
    with pytest.raises(Failed) as first:
        simulate(5, 2000, "hybrid")
    line, sentence = str(first.value).split("\n")
    assert line == "hicache-ray sim --seed 5 --steps 2000 --case hybrid"
    result = CliRunner().invoke(cli.app, line.split()[1:])
    assert result.exit_code == 1
    assert sentence in result.stderr.replace("\n", " ") or sentence.split()[0] in result.stderr


def test_a_drop_that_overtakes_a_forward_on_its_way_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that resumes, and has been sent, ends as usual: what it reads was there when it was sent."""
    world = World(3, replace(cases()["full"], faults=0.0, calm=True))
    real, overtaken = Member._send, []

    def send(self: Member, envelope: Envelope) -> None:
        real(self, envelope)
        if isinstance(envelope.record, Compute) and envelope.record.start and len(overtaken) < 20:
            space = self.prompts[envelope.record.rid].space
            overtaken.append(space)
            world.later(0.0, lambda: world.drops.begin(space))

    monkeypatch.setattr(Member, "_send", send)
    tally = world.run(2000)
    assert len(overtaken) == 20
    assert tally.drops["complete"] > 3
    assert tally.drops["failed"] == 0


def test_unknown_cases_are_refused() -> None:
    result = CliRunner().invoke(cli.app, ["sim", "--case", "hybird"])
    assert result.exit_code == 2
    assert 'there is no case "hybird"; choose one of random, full' in result.stderr.replace("\n", " ")


def test_the_report_measures_what_policies_reuse() -> None:
    rows = measure(0, 400)
    assert {(row.case, row.policy) for row in rows} >= {("full", "write_through"), ("hybrid", "write_back")}
    assert all(0.0 < row.tally.hit_share < 1.0 and 0.0 < row.tally.token_share < 1.0 for row in rows)
    assert all(not row.tally.faults and row.tally.served == row.tally.requests for row in rows)


@pytest.mark.parametrize(("copies", "least"), [(1, 0.85), (2, 1.0)])
def test_what_prompts_hit_survives_a_lost_storage_node(copies: int, least: float) -> None:
    lost = loss(1, 600, ShardConfig("writer", copies))
    assert len(lost.left) == 10
    assert least <= lost.mean <= 1.0


def test_the_command_prints_what_it_lived() -> None:
    result = CliRunner().invoke(cli.app, ["sim", "--steps", "300", "--case", "mla"])
    assert result.exit_code == 0
    assert "hicache-ray sim --seed 0 --steps 300 --case mla" in result.stderr
    assert "every invariant held" in result.stdout
