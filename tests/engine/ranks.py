"""Rank processes for the tests: each keeps engines and does what its pipe tells it, like a rank actor without Ray."""

from __future__ import annotations

import multiprocessing
import socket
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from hicache_ray.errors import HiCacheError
from hicache_ray.integrations.transformers import TpConfig, build, join, leave
from tests.engine.rig import PAGE, Result, Rig, prompt

DEADLINE_S = 60.0


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


class Worker:
    """The commands that a rank process knows."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.rigs: dict[str, Rig] = {}

    def join(self, port: int, gloo_timeout_s: float) -> None:
        join(TpConfig(self.rank, self.world, port, startup_timeout_s=30, gloo_timeout_s=gloo_timeout_s))

    def leave(self) -> None:
        leave()

    def build(self, family: str, folder: str) -> None:
        self.rigs[family] = Rig(build(folder, PAGE, rank=self.rank, world=self.world))

    def cold_and_resumed(self, family: str, count: int, steps: int, start: int) -> tuple[Result, Result]:
        return self.rigs[family].cold_and_resumed(prompt(count), steps, start)

    def cold(self, family: str, count: int, steps: int) -> Result:
        rig = self.rigs[family]
        return rig.run(rig.record(prompt(count), steps))


def serve(pipe: Connection, rank: int, world: int) -> None:
    """Body of a rank process: (command, arguments) in, (result, error) out, until the pipe closes."""
    torch.set_num_threads(1)
    worker = Worker(rank, world)
    while True:
        try:
            command, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((getattr(worker, command)(*arguments), ""))
        except HiCacheError as error:
            pipe.send((None, f"{type(error).__name__}: {error}"))


@dataclass(frozen=True)
class Rank:
    """The test's end of one rank process."""

    process: BaseProcess
    pipe: Connection

    @classmethod
    def start(cls, rank: int, world: int) -> Rank:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, rank, world), daemon=True)
        process.start()
        theirs.close()
        return cls(process, ours)

    def tell(self, command: str, *arguments: Any) -> None:
        self.pipe.send((command, arguments))

    def answer(self) -> tuple[Any, str]:
        """The result and the error sentence of the oldest command that has not been answered."""
        assert self.pipe.poll(DEADLINE_S), "the rank did not answer"
        result, error = self.pipe.recv()
        return result, error

    def kill(self) -> None:
        self.process.kill()
        self.process.join(DEADLINE_S)

    def stop(self) -> None:
        self.pipe.close()
        self.process.join(DEADLINE_S)


def ask(ranks: list[Rank], command: str, *arguments: Any) -> list[Any]:
    """The same command on every rank at once; their results. No rank may fail."""
    for rank in ranks:
        rank.tell(command, *arguments)
    answers = [rank.answer() for rank in ranks]
    assert [error for _, error in answers] == [""] * len(ranks)
    return [result for result, _ in answers]
