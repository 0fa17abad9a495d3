"""T045: keys do not depend on the process. (Foreign keys cannot be plugged in yet.)"""

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
    "8c563df9bc06a04b447e31d85b3a2b44356a4a6aecd67583ef310bb7f0cdb7e8",
    "d3368c781cde97f666b994450d1c07aa22f901efb304eac90a8cc9fed4831f40",
    "28e79bbedd6c6f7940de01aa2a085688d50bdd37c0e21f2bcc9b7beceaabf01b",
]


@pytest.mark.parametrize("extra", ["none", "empty"])
@pytest.mark.parametrize("seed", ["1", "2"])
def test_t045_keys_do_not_depend_on_the_process(seed: str, extra: str) -> None:
    environment = os.environ | {"PYTHONHASHSEED": seed}
    command = [sys.executable, "-c", SCRIPT, extra]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == GOLDEN
