"""T045: keys do not depend on the process. (Foreign keys cannot be plugged in yet, so there is no hash of theirs to refuse.)"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys
from hicache_ray.keys import Namespace, as_tokens, page_keys
extra = {"none": {}, "empty": {"revision": "", "adapter": "", "salt": ""}}[sys.argv[1]]
print(json.dumps([k.hex() for k in page_keys(Namespace("llama", page_size=4, **extra), as_tokens(range(1, 14)))]))
"""
#: Golden: stands for other Python builds and machines.
GOLDEN = [
    "b313d6434191770b3e5ce08d9913f2783e5ce08d9913f27818882d103c37515cd52ebc9c4af93e2ae0330e88db2af2ba",
    "b313d6434191770b3e5ce08d9913f278579a8cc786c503fc2774492c0f0fcda8509a10579791addae4bf1447356db461",
    "b313d6434191770b3e5ce08d9913f278d8b9001c57193e340cc31e9aea6a5ee32f426dafe6bbbabf38d6757e4393a82a",
]


@pytest.mark.parametrize("extra", ["none", "empty"])
@pytest.mark.parametrize("seed", ["1", "2"])
def test_t045_keys_do_not_depend_on_the_process(seed: str, extra: str) -> None:
    environment = os.environ | {"PYTHONHASHSEED": seed}
    command = [sys.executable, "-c", SCRIPT, extra]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == GOLDEN
