"""The evict-and-return probe: does the tier really reuse, from every tier, under this configuration, bit for bit?

R-cold; enough unique prompts to evict R from the device; R-return (from the host); R-again (from the device); wait until L3 has sealed
every page and snapshot of R, flush device and host; R-storage (from L3); a second replica that never saw R; R-other (from L3 again). Each
step is an ordinary request over HTTP; time to first token is measured at the client.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import httpx
import numpy as np

from hicache_ray.actors import cluster
from hicache_ray.actors.cluster import Cluster, Progress, quiet
from hicache_ray.config import Config
from hicache_ray.config_sources import changed
from hicache_ray.errors import ConfigError, HiCacheError
from hicache_ray.interrupts import Interrupts
from hicache_ray.probe_result import Result, Step
from hicache_ray.spec import Kind

NEW_TOKENS = 4
FILLER_TOKENS = 2049
REQUEST_S = 300.0
#: Longest time without another page of R sealed.
SEAL_S = 10.0
#: Requests until Serve's router has sent one to the new replica.
ROUTER_TRIES = 64

#: Which tier each step must hit, as the key of the counts.
MUST_HIT: Mapping[str, str] = {"return": "host", "again": "device", "storage": "storage", "other": "storage"}


def check(config: Config, prompt_tokens: int) -> None:
    """Raise :class:`ConfigError` where a probe could show nothing."""
    unit = config.cache.grid or config.cache.page_size
    if prompt_tokens <= unit:
        least = unit + 1
        raise ConfigError(f"--prompt-tokens is {prompt_tokens}, which leaves nothing to reuse on a grid of {unit}; choose at least {least}")
    if config.storage.backend == "none":
        raise ConfigError("storage.backend is none, and the probe asks for reuse from storage; choose arena")


def sized(config: Config, prompt_tokens: int, given: frozenset[str] = frozenset()) -> Config:
    """The configuration with pools that hold one such prompt and little more, so that a few others evict it; settings in ``given`` stay."""
    check(config, prompt_tokens)
    grid = config.cache.grid or config.cache.page_size
    room = -(-(prompt_tokens + NEW_TOKENS) // grid) * grid + grid
    wanted: dict[str, object] = {
        "cache.device_tokens": room,
        "cache.device_snapshots": prompt_tokens // grid + 4,
        "cache.host_ratio": 4.0,
        "engine.max_prompt_tokens": prompt_tokens,
        "engine.max_new_tokens": NEW_TOKENS,
    }
    return changed(config, {name: value for name, value in wanted.items() if name not in given})


def run(config: Config, prompt_tokens: int, progress: Progress = quiet, interrupts: Interrupts | None = None) -> Result:
    """Start a tier, probe it, stop it. Raises :class:`HiCacheError` when a step cannot be carried out at all."""
    check(config, prompt_tokens)
    interrupts = interrupts or Interrupts()
    # A tier of its own, for nobody's clients: its requests need no key.
    ours = config.model_copy(update={"tenants": {}})
    with cluster.start(ours, progress=progress, interrupts=interrupts) as running, interrupts.raising():
        return Probe(running, prompt_tokens, progress).run()


class Probe:
    """The steps, over the HTTP endpoints of a running tier with one replica."""

    def __init__(self, running: Cluster, prompt_tokens: int, progress: Progress) -> None:
        config = running.config
        self.running, self.progress = running, progress
        self.result = Result(
            config.model.family, config.model.tp, config.cache.write_policy, config.cache.layout, config.cache.page_size,
            config.cache.grid, prompt_tokens,
        )  # fmt: skip
        self.random = np.random.default_rng(config.model.seed)
        self.prompt = self._tokens(prompt_tokens)
        self.cold: dict[str, Any] = {}
        self.client = httpx.Client(timeout=httpx.Timeout(REQUEST_S, connect=10.0))

    def run(self) -> Result:
        with self.client:
            self._warm_up()
            self._step("cold")
            made = self._where()["held"]["device"]
            self._evict()
            self._step("return")
            self._step("again")
            self._on_grid()
            self._wait_sealed(made)
            self._admin("/flush", {"tiers": ["device", "host"], "timeout_s": 30})
            self._step("storage")
            self.progress("starting a second replica")
            self.running.scale(2)
            self._step("other")
        return self.result

    def _tokens(self, count: int) -> list[int]:
        # Ids that every vocabulary of ours has; 0 to 2 are special.
        drawn: list[int] = self.random.integers(3, 500, count).tolist()
        return drawn

    def _warm_up(self) -> None:
        """First-use costs of libraries are not what a cold prefix costs: run a short unrelated prompt twice."""
        self.progress("warming up")
        tokens = self._tokens(self.result.grid + 1)
        for _ in range(2):
            self._generate(tokens)

    # -- requests -----------------------------------------------------------------------------------------------------------------

    def _generate(self, tokens: list[int]) -> tuple[float, dict[str, Any]]:
        """Time to first token at the client in seconds, and the whole answer."""
        body = {"input_ids": tokens, "max_new_tokens": NEW_TOKENS, "return_logprob": True, "stream": True, "digests": True}
        began, first, answer = time.perf_counter(), 0.0, None
        with self.client.stream("POST", f"{self.running.url}/generate", json=body) as response:
            if response.status_code != 200:
                raise HiCacheError(f"a probe request was answered with {response.status_code}: {response.read().decode()[:500]}")
            for line in response.iter_lines():
                if not line.startswith("data: "):
                    continue
                first = first or time.perf_counter() - began
                answer = json.loads(line.removeprefix("data: "))
        if answer is None or "output_ids" not in answer:
            raise HiCacheError(f"a probe request ended early: {answer}")
        return first, answer

    def _admin(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self.running.token}"}
        response = self.client.post(f"{self.running.admin_url}{path}", json=body, headers=headers)
        if response.status_code != 200:
            raise HiCacheError(f"{path} was answered with {response.status_code}: {response.text[:500]}")
        out: dict[str, Any] = response.json()
        return out

    def _where(self) -> dict[str, Any]:
        """What each tier of the first replica holds of R."""
        replicas = self._admin("/where", {"input_ids": self.prompt})
        mine: dict[str, Any] = replicas[self.cold["replica"]]
        if "error" in mine:
            raise HiCacheError(f"the replica does not say what it holds: {mine['error']}")
        return mine

    # -- steps ----------------------------------------------------------------------------------------------------------------------

    def _step(self, name: str) -> None:
        self.progress(f"R-{name}: {len(self.prompt)} tokens")
        ttft, answer = self._generate(self.prompt)
        if name == "cold":
            self.cold = answer
        for _ in range(ROUTER_TRIES if name == "other" else 0):
            if answer["replica"] != self.cold["replica"]:
                break
            ttft, answer = self._generate(self.prompt)
        step = self._judge(name, ttft, answer, self.cold)
        self.result.steps.append(step)
        if name in MUST_HIT:
            self._require(step, MUST_HIT[name], len(self.prompt) - 1)
        if name == "other" and step.replica == self.cold["replica"]:
            self.result.problems.append(f"R-other: no request reached the second replica in {ROUTER_TRIES} tries")

    def _on_grid(self) -> None:
        """The same prompt cut to a multiple of the grid. Its own cold run is part of R's, so only what it reuses is judged."""
        grid = self.result.grid
        tokens = self.prompt[: len(self.prompt) // grid * grid] if grid else []
        if not tokens or len(tokens) == len(self.prompt):
            return
        self.progress(f"R cut to {len(tokens)} tokens, a multiple of the grid")
        _, first = self._generate(tokens)
        ttft, again = self._generate(tokens)
        self.result.on_grid = self._judge("on_grid", ttft, again, first)
        self._require(self.result.on_grid, "device", len(tokens) - 1)

    def _judge(self, name: str, ttft: float, answer: dict[str, Any], cold: dict[str, Any]) -> Step:
        reused = answer["cached_tokens"]
        pages = sum(reused.values()) // self.result.page_size
        same = all(answer[key] == cold[key] for key in ("output_ids", "logprobs"))
        return Step(
            name, round(ttft, 4), reused["device"], reused["host"], reused["storage"], answer["computed_tokens"], same,
            _digests_equal(answer["digests"], cold["digests"], pages), answer["replica"],
        )  # fmt: skip

    def _require(self, step: Step, tier: str, most: int) -> None:
        """Note what a step that must hit has missed: it reuses the largest multiple of the grid, from that tier."""
        unit = self.result.grid or self.result.page_size
        wanted = most // unit * unit
        got = getattr(step, f"reused_{tier}")
        if got != wanted:
            self.result.problems.append(f"R-{step.name}: {got} tokens came from the {tier}, and {wanted} should have")
        if not step.bit_exact:
            self.result.problems.append(f"R-{step.name}: tokens or logprobs differ from those of the cold run")
        if not step.digests_equal:
            self.result.problems.append(f"R-{step.name}: a restored page or snapshot differs from the one that was made")

    def _evict(self) -> None:
        """Unique prompts until the device holds nothing of R.

        Long ones until its full pages are gone. The window or state of its last length outlives the inner ones of other prompts, so for
        those there are prompts of one chunk, which have nothing but a last length.
        """
        cache, components = self.running.config.cache, self.running.prepared.spec.components
        lasting = {c.name for c in components if c.kind is not Kind.FULL}
        long = size = min(FILLER_TOKENS, self.running.config.engine.max_prompt_tokens)
        short = (self.result.grid or self.result.page_size) + 1
        enough = 3 * cache.device_tokens // long + 3 + (cache.device_tokens // short + cache.device_snapshots if lasting else 0)
        for count in range(1, enough + 1):
            self.progress(f"evicting R with unique prompts ({count})")
            self._generate(self._tokens(size))
            held = {name for name, pages in self._where()["held"]["device"].items() if pages}
            if not held:
                return
            size = short if held <= lasting else long
        raise HiCacheError(f"{enough} unique prompts of up to {long} tokens did not evict R from the device; lower cache.device_tokens")

    def _wait_sealed(self, made: Mapping[str, int]) -> None:
        """Until L3 holds every page and snapshot that the cold run has made, or nothing has been added for some time."""
        self.progress("waiting until storage has sealed every page and snapshot of R")
        held: dict[str, int] = {}
        until = time.monotonic() + SEAL_S
        while time.monotonic() < until:
            before, held = held, self._where()["held"]["storage"]
            if all(held.get(name, 0) >= count for name, count in made.items()):
                return
            if held != before:
                until = time.monotonic() + SEAL_S
            time.sleep(0.05)
        self.result.problems.append(f"storage holds {held} of R and should hold {dict(made)}: the host or storage is too small")


def _digests_equal(mine: Mapping[str, Any], cold: Mapping[str, Any], pages: int) -> bool:
    """Every page and snapshot below ``pages`` that was on the device afterwards has the digest of its production. JSON keys are text."""
    for component, by_page in mine.items():
        for page, digests in by_page.items():
            if int(page) < pages and cold.get(component, {}).get(page) != digests:
                return False
    return True
