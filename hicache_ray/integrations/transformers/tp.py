"""Tensor parallelism: the ranks of a group each hold a range of heads and of hidden units, and sum their partial outputs over gloo.

Every rank executes the same Compute records in the same order. Attention and gated delta nets are split by heads, so that each rank's
pages and snapshots are really a shard; MLPs by their hidden units. Embedding, norms and head are replicated: the head costs less than the
two collectives that splitting it would add to every step.

Why all ranks choose the same token: after each all-reduce all ranks hold the *same bits*. With two ranks there is one sum, a + b, and
floating-point addition commutes; with more, gloo's ring reduces every segment on one rank and copies the result to the others. Between
two all-reduces each rank applies the same kernels, threads and replicated weights to those bits. So the logits are equal bit for bit, and
no token needs to be broadcast. (Ranks on unlike processors would not be covered; a group lives on machines of one kind.)

transformers' own ``tp_plan="auto"`` is not used: it replicates the states of gated delta nets on every rank, and it splits the head.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _set_pg_timeout
from transformers import PreTrainedModel

from hicache_ray.errors import ConfigError, GroupLost

#: Linear layers that are split by their outputs, and those split by their inputs, whose partial outputs are summed.
SPLIT_OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
SPLIT_INPUTS = ("o_proj", "down_proj")


@dataclass(frozen=True)
class TpConfig:
    """One rank's place in a group. ``startup_timeout_s`` covers how far apart the ranks start; ``gloo_timeout_s`` how long a rank waits
    for another in a forward before it reports the group as lost."""

    rank: int
    world: int
    port: int
    address: str = "127.0.0.1"
    startup_timeout_s: float = 120.0
    gloo_timeout_s: float = 10.0


def join(config: TpConfig) -> None:
    """Enter the process group; returns when all ranks are there. A group of one has nothing to join.

    Raises :class:`GroupLost` when they are not within the start-up timeout, :class:`ConfigError` when this process is in a group already.
    """
    _check_rank(config.rank, config.world)
    if config.world == 1:
        return
    if dist.is_initialized():
        raise ConfigError("this process is already in a process group; call leave() before it joins another")
    where = f"tcp://{config.address}:{config.port}"
    try:
        dist.init_process_group(
            "gloo", init_method=where, rank=config.rank, world_size=config.world, timeout=timedelta(seconds=config.startup_timeout_s)
        )
        present = torch.ones(1)
        dist.all_reduce(present)
    except RuntimeError as error:
        leave()
        raise GroupLost(
            f"rank {config.rank} of {config.world} did not meet the others at {where} within {config.startup_timeout_s:g} s; "
            f"start all ranks together, with a free port ({error})"
        ) from error
    # From here on a rank waits only for a forward that its peers run at the same time.
    _set_pg_timeout(timedelta(seconds=config.gloo_timeout_s), dist.group.WORLD)


def leave() -> None:
    """Leave the group, alive or lost; the loaded model stays and works again in the next group that this process joins."""
    if dist.is_initialized():
        dist.destroy_process_group()


class SummedLinear(nn.Module):
    """The columns of a linear layer that belong to this rank's inputs; the ranks' partial outputs are summed.

    Raises :class:`GroupLost` when another rank does not answer.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = nn.functional.linear(x, self.weight)
        if not dist.is_initialized():
            raise GroupLost("a sharded model needs its process group; call join() on every rank before the first forward")
        try:
            dist.all_reduce(out)
        except RuntimeError as error:
            raise GroupLost(
                f"another rank of the group died or froze during a forward; leave the group and join a new one ({error})"
            ) from error
        return out if self.bias is None else out + self.bias


def check(config: Any, rank: int, world: int) -> None:
    """:class:`ConfigError` when ``world`` ranks cannot share the model (the cache spec has checked its key-value and linear heads)."""
    _check_rank(rank, world)
    if world == 1:
        return
    for name in ("num_attention_heads", "intermediate_size"):
        count = int(getattr(config, name))
        if count % world:
            raise ConfigError(f'model.tp is {world}, which does not divide the {name} {count} of "{config.model_type}"; choose a divisor')


def _check_rank(rank: int, world: int) -> None:
    if not 0 <= rank < world:
        raise ConfigError(f"rank {rank} is not one of the {world} ranks of a group; ranks count from 0")


def shard(model: PreTrainedModel, rank: int, world: int) -> None:
    """Cut a whole model down to what rank ``rank`` of ``world`` computes, in place. Needs no process group yet."""
    if world == 1:
        return
    for module in list(model.modules()):
        if hasattr(module, "in_proj_qkv"):
            _shard_delta_net(module, rank, world)
            continue
        children: list[tuple[str, Any]] = list(module.named_children())
        for name, child in children:
            if name in SPLIT_OUTPUTS:
                _keep_outputs(child, _part(child.out_features, rank, world))
            elif name in SPLIT_INPUTS:
                setattr(module, name, _keep_inputs(child, _part(child.in_features, rank, world)))


def _shard_delta_net(net: Any, rank: int, world: int) -> None:
    """By heads. Queries, keys and values are three blocks of one projection; a key head serves consecutive value heads."""
    keys, values = _part(net.key_dim, rank, world), _part(net.value_dim, rank, world)
    mixed = [*keys, *(net.key_dim + i for i in keys), *(2 * net.key_dim + i for i in values)]
    heads = _part(net.num_v_heads, rank, world)
    _keep_outputs(net.in_proj_qkv, mixed)
    net.conv1d.weight = _kept(net.conv1d.weight, mixed)
    net.conv1d.in_channels = net.conv1d.out_channels = net.conv1d.groups = len(mixed)
    _keep_outputs(net.in_proj_z, values)
    _keep_outputs(net.in_proj_b, heads)
    _keep_outputs(net.in_proj_a, heads)
    net.A_log, net.dt_bias = _kept(net.A_log, heads), _kept(net.dt_bias, heads)
    net.out_proj = _keep_inputs(net.out_proj, values)
    net.num_k_heads, net.num_v_heads = net.num_k_heads // world, net.num_v_heads // world
    net.key_dim, net.value_dim, net.conv_dim = len(keys), len(values), len(mixed)


def _part(count: int, rank: int, world: int) -> range:
    return range(rank * count // world, (rank + 1) * count // world)


def _kept(parameter: torch.Tensor, indices: Iterable[int]) -> nn.Parameter:
    """The rows ``indices`` of a parameter, as one that holds no more memory than them."""
    return nn.Parameter(parameter.data[torch.tensor(list(indices), device=parameter.device)], requires_grad=False)


def _keep_outputs(linear: Any, indices: Iterable[int]) -> None:
    linear.weight = _kept(linear.weight, indices)
    if linear.bias is not None:
        linear.bias = _kept(linear.bias, indices)
    linear.out_features = linear.weight.shape[0]


def _keep_inputs(linear: Any, indices: Iterable[int]) -> SummedLinear:
    columns = torch.tensor(list(indices), device=linear.weight.device)
    return SummedLinear(linear.weight.data.index_select(1, columns), None if linear.bias is None else linear.bias.data)
