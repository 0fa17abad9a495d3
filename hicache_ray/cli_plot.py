"""Pictures of what the command line measures."""

from __future__ import annotations

from collections.abc import Sequence

from hicache_ray.errors import ConfigError
from hicache_ray.replay import Replayed
from hicache_ray.trace import Ceiling


def draw(file: str, name: str, runs: Sequence[Replayed], limits: Ceiling) -> None:
    """Hit ratio over capacity, a line for each policy, and the ceiling. Raises :class:`ConfigError` where it cannot be drawn."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--plot needs matplotlib; install it, or leave --plot out") from None
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for policy in dict.fromkeys(run.policy for run in runs):
        points = sorted((run.sizes.device or limits.distinct, run.hit_ratio) for run in runs if run.policy == policy)
        axes.plot([x for x, _ in points], [100 * y for _, y in points], marker="o", label=policy)
    axes.axhline(100 * limits.hit_ratio, linestyle="--", color="gray", label="ceiling")
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set(xlabel="capacity (blocks)", ylabel="hits (% of all blocks)", title=name)
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {file} cannot be written: {error}; give a file such as replay.png") from None
