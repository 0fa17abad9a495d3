"""The engine of a virtual rank: checks all that a model would read, and writes what it would make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hicache_ray.records import Compute, Outcome
from hicache_ray.settings import Settings
from hicache_ray.simulate_content import GARBAGE, GENERATION, Contents, Prompt, Violation, same_page
from hicache_ray.spec import CacheSpec, Component


@dataclass
class Run:
    """A request that this rank computes. ``live``: what its running states are, ``partial``: its pages that are not full.

    ``clean``: it began on the grid and has read canonical bytes only, so that whole chunks of its prefill are canonical. ``generation``: of
    what it makes; ``floor``: the least of what it may read.
    """

    live: int
    partial: int
    clean: bool
    end: int
    generation: int = 0
    floor: int = 0


@dataclass
class Written:
    """What a record under way reads and writes: (pool, slot, content); ``touched``: its slots per component."""

    prompt: Prompt
    run: Run
    mark: int
    reads: list[tuple[list[int], int, int]] = field(default_factory=list)
    writes: list[tuple[list[int], int, int]] = field(default_factory=list)
    touched: dict[str, list[int]] = field(default_factory=dict)


class Engine:
    """Of one rank, over its device pools (component -> content of every slot). ``group``: those of all ranks, which compute together: what
    only another one holds it has from that one."""

    def __init__(
        self, rank: int, spec: CacheSpec, settings: Settings, contents: Contents, pools: Mapping[str, list[int]], group: Sequence[Engine]
    ) -> None:
        self.rank = rank
        self.spec = spec
        self.settings = settings
        self.contents = contents
        self.pools = pools
        self.group = group
        self.runs: dict[str, Run] = {}

    def begin(self, record: Compute, prompt: Prompt, mark: int, generation: int, floor: int) -> Written:
        """Check everything that is read; what is written becomes unreadable. ``generation``, ``floor``: of a run that begins."""
        run, first = self.runs.get(record.rid), False
        if run is None:
            first, grid = True, self.settings.grid
            clean = bool(grid) and record.start % grid == 0
            run = self.runs[record.rid] = Run(self.contents.mark(), self.contents.mark(), clean, record.start, generation, floor)
        stop = record.start + len(record.feed)
        if record.start != run.end or record.feed.tolist() != prompt.values[record.start : stop]:
            raise Violation(f"request {record.rid} was told to run other tokens than its own at {record.start}")
        work = Written(prompt, run, mark)
        for c in self.spec.components:
            (self._read_state if c.is_state else self._read_pages)(c, record, prompt, work, first)
        # Only now is it known whether what is made is canonical.
        for c in self.spec.components:
            (self._write_state if c.is_state else self._write_pages)(c, record, prompt, work, first)
        for pool, slot, _ in work.writes:
            pool[slot] = mark
        return work

    def end(self, record: Compute, work: Written) -> Outcome:
        """What was read is still there; what was made is there now."""
        for pool, slot, content in work.reads:
            if pool[slot] != content and pool[slot] != work.mark:
                raise Violation(f"rank {self.rank}: a page that request {record.rid} uses changed while it was computed")
        for pool, slot, _ in work.writes:
            if pool[slot] != work.mark:
                raise Violation(f"rank {self.rank}: somebody else wrote to a slot that request {record.rid} fills")
        for pool, slot, content in work.writes:
            pool[slot] = content
        work.run.end = record.end
        first = record.start + len(record.feed)
        output = tuple(work.prompt.values[first : first + record.steps])
        return Outcome(output=output, logprobs=(0.0,) * len(output))

    def spoil(self, work: Written) -> None:
        """The forward has failed half-way."""
        for pool, slot, _ in work.writes:
            pool[slot] = GARBAGE

    # -- what is read -------------------------------------------------------------------------------------------------------------

    def _read_pages(self, c: Component, record: Compute, prompt: Prompt, work: Written, first: bool) -> None:
        span, begin = self.spec.page_size * c.page_span, record.valid.get(c.name, record.start)
        table, pool = record.tables[c.name].tolist(), self.pools[c.name]
        used = range(c.lo(begin) // span, begin // span)
        for page in used:
            self._read(c, record, table[page], (page + 1) * span, work, first)
        if begin % span and self._holds(c, (begin // span + 1) * span):
            slot = table[begin // span]
            if first or pool[slot] != work.run.partial:
                raise Violation(f"rank {self.rank}: request {record.rid} finds its page of {c.name!r} at {begin} overwritten, or none")
            work.reads.append((pool, slot, work.run.partial))
        work.touched[c.name] = [table[page] for page in used]

    def _read_state(self, c: Component, record: Compute, prompt: Prompt, work: Written, first: bool) -> None:
        pool, slot = self.pools[c.name], record.resume.get(c.name)
        work.touched[c.name] = []
        if slot is None:
            if record.start:
                raise Violation(f"request {record.rid} resumes at {record.start} without a snapshot of {c.name!r}")
        elif slot >= 0:
            self._read(c, record, slot, record.start, work, first)
            work.touched[c.name].append(slot)
        elif self._holds(c, record.start) and (first or pool[record.live[c.name]] != work.run.live):
            raise Violation(f"rank {self.rank}: the running state of {c.name!r} of request {record.rid} was overwritten")

    def _holds(self, c: Component, end: int) -> bool:
        """Whether the page (snapshot) that ends with token ``end`` is this rank's."""
        return self.spec.owns(c, self.rank, end // self.spec.page_size - 1)

    def _read(self, c: Component, record: Compute, slot: int, end: int, work: Written, first: bool) -> None:
        if not self._holds(c, end):
            owner = next(engine for engine in self.group if engine._holds(c, end))
            work.run.clean &= not (first and c.role == "target") or bool(owner.pools[c.name][slot] & 1)
            return
        pool, number = self.pools[c.name], self._number(c, work.prompt, end)
        found = pool[slot] if slot >= 0 else None
        wanted = None if number is None else self.contents.made(c.name, self.rank, number, False)
        if found is None or wanted is None or not same_page(found, wanted, work.run.floor if first else 0):
            # Of what nobody can name yet only its maker may read.
            if found is not None and wanted is None and found == work.run.partial and not first:
                work.reads.append((pool, slot, found))
                return
            raise Violation(
                f"rank {self.rank}: request {record.rid} reads {found} as a page of {c.name!r} from slot {slot} where {wanted} should be"
            )
        if first and c.role == "target" and not found & 1:
            work.run.clean = False
            if self.settings.exact:
                raise Violation(f"rank {self.rank}: under exact a request reads a page of {c.name!r} that is not canonical")
        work.reads.append((pool, slot, found))

    # -- what is written ----------------------------------------------------------------------------------------------------------

    def _write_pages(self, c: Component, record: Compute, prompt: Prompt, work: Written, first: bool) -> None:
        span, begin = self.spec.page_size * c.page_span, record.valid.get(c.name, record.start)
        table, pool = record.tables[c.name].tolist(), self.pools[c.name]
        made = range(begin // span, record.end // span)
        for page in (page for page in made if self._holds(c, (page + 1) * span)):
            content = self._made(c, prompt, (page + 1) * span, work.run, record, first)
            work.writes.append((pool, table[page], content))
        work.touched[c.name] += [table[page] for page in made]
        if record.end % span:
            if self._holds(c, (record.end // span + 1) * span):
                work.writes.append((pool, table[record.end // span], work.run.partial))
            work.touched[c.name].append(table[record.end // span])

    def _write_state(self, c: Component, record: Compute, prompt: Prompt, work: Written, first: bool) -> None:
        pool, stop, grid = self.pools[c.name], record.start + len(record.feed), record.grid
        asked = record.snapshots.get(c.name, ())
        for length, slot in asked:
            # A snapshot can be taken where a forward ends: at the chunks' ends, at the end of the prompt, after every decoded token.
            if not (record.start < length <= record.end and (length >= stop or (grid and length % grid == 0))):
                raise Violation(f"request {record.rid} is to make a snapshot of {c.name!r} at {length}, where no forward ends")
            if self._holds(c, length):
                work.writes.append((pool, slot, self._made(c, prompt, length, work.run, record, first)))
        if self._holds(c, self.spec.page_size):
            work.writes.append((pool, record.live[c.name], work.run.live))
        work.touched[c.name] += [record.live[c.name], *(slot for _, slot in asked)]

    def _made(self, c: Component, prompt: Prompt, end: int, run: Run, record: Compute, first: bool) -> int:
        number = self._number(c, prompt, end)
        if number is None:
            return run.partial
        grid = self.settings.grid
        whole = bool(grid) and first and run.clean and end <= (record.start + len(record.feed)) // grid * grid
        return self.contents.made(c.name, self.rank, number, whole or c.role == "draft") + run.generation * GENERATION

    def _number(self, c: Component, prompt: Prompt, end: int) -> int | None:
        """What the page (snapshot) that ends with token ``end`` stands for; None where the tokens that it depends on are not known."""
        ids = prompt.ahead[c.lookahead] if c.lookahead else prompt.ids
        at = end // self.spec.page_size - 1
        if end % self.spec.page_size or at >= len(ids):
            return None
        return ids[at]
