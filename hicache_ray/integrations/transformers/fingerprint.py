"""What the bits of this engine's results depend on, beside the model and the settings."""

from __future__ import annotations

import platform
from importlib.metadata import version

import torch

#: The attention implementation that models are loaded with.
ATTENTION = "sdpa"


def fingerprint() -> dict[str, str]:
    """Readable fields that become part of the recipe of canonical bytes."""
    return {
        "engine": "transformers",
        "attention": ATTENTION,
        "build": f"torch {torch.__version__}, transformers {version('transformers')}",
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
    }
