"""Histories that are lived at every test run: every case, and some that seeds make up. ``make soak`` lives others."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from hicache_ray import cli, cli_out, simulate_report
from hicache_ray.cli_sim import lives_table
from hicache_ray.flights import Envelope
from hicache_ray.records import Compute
from hicache_ray.simulate import Failed, Tally, World, simulate
from hicache_ray.simulate_cases import cases
from hicache_ray.simulate_faults import Faults
from hicache_ray.simulate_group import Member
from hicache_ray.simulate_report import loss, measure
from hicache_ray.simulate_settings import CHOICES, LIFETIMES_S, PRIORITIES, USUAL
from hicache_ray.slots import SlotPool
from hicache_ray.spec import Kind, Shard
from hicache_ray.storage.peers import ShardConfig

STEPS = 1200
#: Of the histories that seeds make up.
SEEDS = range(20)


@pytest.mark.parametrize("case", cases())
def test_every_case_holds(case: str) -> None:
    tally = simulate(1, STEPS, case)
    assert tally.events >= STEPS
    assert tally.rests >= 1
    assert tally.served > 0
    assert sum(tally.tokens.values()) > 0


@pytest.mark.parametrize("first", SEEDS[::4])
def test_random_histories_hold(first: int) -> None:
    for seed in SEEDS[first : first + 4]:
        print(f"hicache-ray sim --seed {seed} --steps {STEPS}")  # shown where the test fails
        assert simulate(seed, STEPS).served > 0


def test_a_request_that_a_drop_lets_begin_ends_as_usual() -> None:
    """The prefetch that had the device is revoked by a drop; so a request of the same space loads, before its pages lose their names."""
    assert simulate(777174, 600).drops["begun"] > 0


@pytest.mark.parametrize("case", ["keeps_tight", "keeps_tight_selective"])
@pytest.mark.parametrize("seed", [2, 7, 8])
def test_nothing_is_forgotten_while_storage_has_room(case: str, seed: int) -> None:
    """The host is smaller than what requests load, wait for and leave behind at once."""
    assert simulate(seed, STEPS, case).served > 0


def test_the_seeds_have_every_value_of_every_setting() -> None:
    """And every kind of component, on all ranks, on some of them, and with its pages in turn."""
    worlds = [World(seed) for seed in SEEDS]
    for name, values in CHOICES.items():
        assert {getattr(world.settings, name) for world in worlds} == set(values), name
    components = [(world.case.ranks, c) for world in worlds for c in world.case.pools.values()]
    assert {c.kind for _, c in components} == set(Kind)
    assert {c.shard for _, c in components} == set(Shard)
    assert any(0 < len(c.ranks) < ranks for ranks, c in components)
    assert {world.settings.exact for world in worlds} == {True, False}
    hints = [(job.priority, job.ttl_s) for world in worlds for job in (world.load._ask("request")[2] for _ in range(20))]
    assert {priority for priority, _ in hints} == set(PRIORITIES)
    assert {ttl for _, ttl in hints} == set(LIFETIMES_S)


def test_what_a_case_pins_is_not_drawn_and_changes_nothing_else() -> None:
    case = cases()["hybrid"]
    one, other = (World(5, replace(case, settings={"eviction": policy})).settings for policy in ("lfu", "priority"))
    assert (one.eviction, other.eviction) == ("lfu", "priority")
    assert replace(one, eviction=other.eviction) == other


def test_a_lost_group_drains_before_it_comes_back() -> None:
    """In virtual time: what its ranks had begun ends record by record, or with them, and nobody is served meanwhile."""
    drained = []
    for seed in range(6):
        world = World(seed, replace(cases()["hybrid"], faults=0.0, settings=USUAL))
        member = world.members[0]
        world._arrivals()
        while len(member.ops) < 2:
            world._pump(world.tally.events + 1)
        begun, drained = world.now, [*drained, [len(member.ops)]]
        member.restart("lost")
        assert (member.down, member.asked, member.incarnation) == (True, {}, 1)
        while member.down:
            assert not member.asked
            drained[-1].append(len(member.ops))
            world._pump(world.tally.events + 1)
        assert (member.incarnation, world.now > begun, member.ops) == (2, True, {})
        assert world.run(800).restarts == 1
    assert any(each[-1] == 0 for each in drained)
    assert any(each[-1] > 0 for each in drained)


def test_histories_have_everything_in_them() -> None:
    """All kinds of faults happen, storage is used and found broken, groups are lost and come back, tokens come from every tier."""
    stormy = replace(cases()["replicas"], faults=6.0, settings=USUAL)
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
    # A console breaks lines where it likes; the words, the event and the time are those of the first life.
    assert "".join(sentence.split()) in "".join(result.stderr.split())


def test_whatever_a_history_stumbles_over_is_named_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what is no violation, from a part that nobody watches."""

    def stumble(self: Faults) -> None:
        raise ZeroDivisionError("nobody had thought of that")

    monkeypatch.setattr(Faults, "strike", stumble)
    with pytest.raises(Failed, match="hicache-ray sim --seed 1 --steps 900 --case hybrid\n.*ZeroDivisionError: nobody had thought of that"):
        simulate(1, 900, "hybrid")


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
    told = result.stderr.replace("\n", " ")
    assert 'there is no case "hybird"; choose one of random, full' in told
    assert "everything, all, mixed" in told
    assert "sim --seed" not in told  # nothing was begun


def test_the_report_measures_what_policies_reuse() -> None:
    rows = measure(0, 400)
    written = {("write_through", "lru"), ("write_through_selective", "lru"), ("write_back", "lru")}
    evicted = {("write_through", "lfu"), ("write_through", "s3fifo"), ("write_through", "priority")}
    for model in ("full", "window", "state", "hybrid", "exact"):
        assert {(row.policy, row.eviction) for row in rows if row.case == model} == written | evicted
    assert all(0.0 < row.tally.hit_share < 1.0 and 0.0 < row.tally.token_share < 1.0 for row in rows)
    assert all(not row.tally.faults and row.tally.served == row.tally.requests for row in rows)


@pytest.mark.parametrize(("copies", "least"), [(1, 0.85), (2, 1.0)])
def test_what_prompts_hit_survives_a_lost_storage_node(copies: int, least: float) -> None:
    lost = loss(1, 600, ShardConfig("writer", copies))
    assert len(lost.left) == 10
    assert least <= lost.mean <= 1.0


def test_the_command_prints_the_report_as_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate_report, "MODELS", ("full", "hybrid"))
    (row,) = [row for row in measure(3, 300) if (row.case, row.policy, row.eviction) == ("hybrid", "write_back", "lru")]
    result = CliRunner().invoke(cli.app, ["sim", "--report", "--seed", "3", "--steps", "300"])
    assert result.exit_code == 0, result.stderr
    assert "share of requests that reuse anything, and of prompt tokens by where they came from" in result.stdout
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.stdout.splitlines() if line.startswith("│")]
    assert len(cells) == 2 * 6 + 4
    shares = [f"{row.tally.tokens[tier] / sum(row.tally.tokens.values()):.1%}" for tier in ("device", "host", "storage", "computed")]
    told = ["hybrid", "write_back", "lru", str(row.tally.served), f"{row.tally.hit_share:.1%}", f"{row.tally.token_share:.1%}", *shares]
    assert told in cells
    assert [line[:2] for line in cells[-4:]] == [["writer", "1"], ["writer", "2"], ["home", "1"], ["home", "2"]]


def test_the_command_prints_what_it_lived() -> None:
    result = CliRunner().invoke(cli.app, ["sim", "--steps", "300", "--case", "mla"])
    assert result.exit_code == 0
    assert "hicache-ray sim --seed 0 --steps 300 --case mla" in result.stderr
    assert "every invariant held" in result.stdout


def test_names_of_cases_are_shown_whole() -> None:
    """They are what the command takes."""
    names = list(cases())
    shown = Console(width=cli_out.WIDTH, record=True, file=io.StringIO())
    shown.print(lives_table([(12345, name, Tally(events=1_234_567, seconds=12345.6, requests=123_456), 1.0) for name in names]))
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.export_text().splitlines() if line.startswith("│")]
    assert [row[1] for row in cells] == names
