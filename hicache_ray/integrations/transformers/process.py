"""What a process that runs models for a command of ours sets for all of itself."""

from __future__ import annotations

import torch
from transformers.utils import logging


def settle_process(threads: int = 1) -> None:
    """``threads`` of torch, whose number is part of what results depend on; and no progress bars or advice on stderr."""
    torch.set_num_threads(threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
