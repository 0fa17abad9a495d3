"""A private world for every test run: own HOME, own temporary folder for Ray, quiet and single-threaded libraries, no network.

Set here at import, before any test imports Ray or torch, and inherited by every process that a test starts.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

#: Ray puts Unix sockets below this folder and their paths are limited to 107 bytes, hence the short name directly under /tmp.
_WORLD = Path(tempfile.mkdtemp(prefix="hcr-", dir="/tmp"))


def _enter(world: Path) -> None:
    for name in [n for n in os.environ if n.startswith(("HICACHE__", "RAY_ADDRESS"))]:
        del os.environ[name]
    home = world / "home"
    home.mkdir()
    os.environ.update(
        HOME=str(home),  # Ray writes its token file there
        HF_HOME=str(home / "hf"),
        HF_HUB_OFFLINE="1",
        OMP_NUM_THREADS="1",
        OMP_WAIT_POLICY="PASSIVE",
        RAY_TMPDIR=str(world),
        RAY_USAGE_STATS_ENABLED="0",
        TOKENIZERS_PARALLELISM="false",
    )
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")


_enter(_WORLD)

# No deadline: the machines that run the tests are shared, and nothing here asserts a time.
settings.register_profile("steady", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize="CI" in os.environ)
settings.load_profile("steady")


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(_WORLD, ignore_errors=True)


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the source tree."""
    return Path(__file__).resolve().parent.parent
