"""What must be in the environment before Ray is imported. Imports nothing heavy."""

from __future__ import annotations

import os
import secrets

#: Where a Ray cluster to join is named.
ADDRESS = "RAY_ADDRESS"


def own_token() -> None:
    """A local Ray of this process asks for a token that lives as long as it does.

    Left alone, Ray would write one into the user's home folder. Whoever has chosen a mode, or joins a cluster, is not touched.
    """
    if "RAY_AUTH_MODE" not in os.environ and ADDRESS not in os.environ:
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))


def quiet() -> None:
    """No progress bars and no usage reports among our own output."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
