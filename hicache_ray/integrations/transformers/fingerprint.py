"""What the bits of this engine's results depend on, beside the model and the settings."""

from __future__ import annotations

import platform
from importlib.metadata import version

import torch
from transformers import PreTrainedModel


def fingerprint(model: PreTrainedModel) -> dict[str, str]:
    """Readable fields that become part of the recipe of canonical bytes."""
    return {
        "engine": "transformers",
        "attention": str(model.config._attn_implementation),
        "build": f"torch {torch.__version__}, transformers {version('transformers')}",
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
    }
