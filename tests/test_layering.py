"""The layering laws, enforced on the source text, and the promise that the core needs neither torch nor Ray, tried in a process."""

from __future__ import annotations

import ast
import graphlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.layers import AMBIENT, CODE_FROM_BYTES, CORE, LIBRARIES, MAY_IMPORT, ROOT, Import, Module, imports, layer_of, product

Law = Callable[[Module, list[Import]], Iterator[str]]


def _where(module: Module, line: int) -> str:
    return f"{module.name}:{line}"


def known_layer(module: Module, _: list[Import]) -> Iterator[str]:
    """Every module has a layer."""
    if module.layer is None:
        yield f"{module.name} belongs to no layer; add it to MODULES in tests/layers.py, in the lowest layer that can hold it"


def downwards(module: Module, found: list[Import]) -> Iterator[str]:
    """A layer imports only the layers below it."""
    for i in found:
        target = layer_of(i.target)
        if module.layer and target and i.target != module.name and target not in MAY_IMPORT[module.layer]:
            yield f"{_where(module, i.line)} ({module.layer}) imports {i.target} ({target})"


def through_the_package(module: Module, found: list[Import]) -> Iterator[str]:
    """The folders at the top are reached as ``hicache_ray.actors`` and ``hicache_ray.storage`` only."""
    for i in found:
        if i.target.partition(".")[0] in ("actors", "storage"):
            yield f"{_where(module, i.line)} imports {i.target}; write hicache_ray.{i.target}"


def libraries(module: Module, found: list[Import]) -> Iterator[str]:
    """Ray, FastAPI, torch, CUDA and the terminal stay in their places; the core has no clock, chance or network."""
    for i in found:
        library = i.target.partition(".")[0]
        places = LIBRARIES.get(library)
        if places is not None and module.layer not in places and module.name not in places:
            yield f"{_where(module, i.line)} imports {i.target}, which belongs in {', '.join(places)}"
        if library in AMBIENT and module.layer in CORE:
            yield f"{_where(module, i.line)} imports {i.target}; the core receives clocks, chance and stores as arguments"


def cli_starts_fast(module: Module, found: list[Import]) -> Iterator[str]:
    """The CLI reaches the actors (and with them Ray) and verify (and with it torch) inside its commands only."""
    for i in found:
        heavy = layer_of(i.target) in ("actors", "integrations", "verify") and i.target != "hicache_ray.verify.result"
        if module.layer == "cli" and heavy and not i.lazy:
            yield f"{_where(module, i.line)} imports {i.target} at its top; import it in the command that needs it"


def no_code_from_bytes(module: Module, found: list[Import]) -> Iterator[str]:
    """No pickle, torch.load, eval; no bare except."""
    for i in found:
        if i.target.partition(".")[0] in CODE_FROM_BYTES:
            yield f"{_where(module, i.line)} imports {i.target}"
    for node in ast.walk(ast.parse(module.source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("eval", "exec", "torch.load", "yaml.load", "yaml.unsafe_load"):
            yield f"{_where(module, node.lineno)} calls {ast.unparse(node.func)}"
        if isinstance(node, ast.Call) and any(k.arg == "allow_pickle" and ast.unparse(k.value) != "False" for k in node.keywords):
            yield f"{_where(module, node.lineno)} allows pickle"
        if isinstance(node, ast.ImportFrom) and node.module == "torch" and any(a.name == "load" for a in node.names):
            yield f"{_where(module, node.lineno)} imports torch.load"
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield f"{_where(module, node.lineno)} has a bare except"


LAWS: list[Law] = [known_layer, downwards, through_the_package, libraries, cli_starts_fast, no_code_from_bytes]


def breaches(law: Law, modules: list[Module]) -> list[str]:
    """All the sentences of one law about these modules."""
    known = frozenset(m.name for m in product()) | {m.name for m in modules}
    return [sentence for m in modules for sentence in law(m, imports(m, known))]


@pytest.mark.parametrize("law", LAWS)
def test_the_product_keeps_the_law(law: Law) -> None:
    modules = product()
    assert {"hicache_ray.errors", "hicache_ray.config", "hicache_ray.store"} <= {m.name for m in modules}
    assert breaches(law, modules) == []


def test_tests_and_benchmarks_reach_the_folders_through_the_package() -> None:
    paths = [p for folder in ("tests", "benchmarks") for p in (ROOT / folder).rglob("*.py")]
    modules = [Module(".".join(p.relative_to(ROOT).with_suffix("").parts), p.read_text(encoding="utf-8")) for p in paths]
    assert breaches(through_the_package, modules) == []


def test_no_module_imports_itself_by_a_detour() -> None:
    assert cycle(product()) == []


def cycle(modules: list[Module]) -> list[str]:
    """The modules of one import cycle, or nothing."""
    known = frozenset(m.name for m in modules)
    graph = {m.name: {i.target for i in imports(m, known) if not i.lazy and i.target in known and i.target != m.name} for m in modules}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


#: law, module, its text, what the sentence must say
CRIMES: list[tuple[Law, str, str, str]] = [
    (known_layer, "hicache_ray.newcomer", "", "add it to MODULES"),
    (
        downwards,
        "hicache_ray.lengths",
        "from hicache_ray import match",
        "hicache_ray.lengths:1 (structures) imports hicache_ray.match (stages)",
    ),
    (downwards, "hicache_ray.match", "from hicache_ray.plan import Plan", "(stages) imports hicache_ray.plan (stages)"),
    (downwards, "hicache_ray.spec", "def f():\n    import hicache_ray.cache", "hicache_ray.spec:2"),
    (downwards, "hicache_ray.storage.arena", "from ..slots import Slots", "(storage) imports hicache_ray.slots (structures)"),
    (downwards, "hicache_ray.cache", "from hicache_ray.storage import memory", "(cache) imports hicache_ray.storage"),
    (downwards, "hicache_ray.integrations.x", "import hicache_ray.actors.rank", "(integrations) imports hicache_ray.actors.rank (actors)"),
    (downwards, "hicache_ray", "from . import cache", "(package) imports hicache_ray.cache (cache)"),
    (through_the_package, "hicache_ray.actors.rank", "from storage.arena import Arena", "write hicache_ray.storage.arena"),
    (through_the_package, "examples.x", "import actors", "write hicache_ray.actors"),
    (libraries, "hicache_ray.cli", "def f():\n    import ray.serve", "imports ray.serve, which belongs in actors"),
    (libraries, "hicache_ray.storage.service", "from fastapi import FastAPI", "imports fastapi"),
    (libraries, "hicache_ray.group", "import torch.distributed as d", "imports torch.distributed"),
    (libraries, "hicache_ray.executor", "import torch", "imports torch"),
    (libraries, "hicache_ray.pool", "import cupy", "which belongs in hicache_ray.copies"),
    (libraries, "hicache_ray.actors.coordinator", "import torch", "imports torch"),
    (libraries, "hicache_ray.group", "from time import monotonic", "the core receives clocks"),
    (cli_starts_fast, "hicache_ray.cli", "from hicache_ray.actors import cluster", "at its top"),
    (no_code_from_bytes, "hicache_ray.storage.x", "import pickle", "imports pickle"),
    (no_code_from_bytes, "hicache_ray.copies", "x = torch.load(f)", "calls torch.load"),
    (no_code_from_bytes, "hicache_ray.copies", "from torch import load", "imports torch.load"),
    (no_code_from_bytes, "hicache_ray.keys", "x = eval('1')", "calls eval"),
    (no_code_from_bytes, "hicache_ray.keys", "np.load(f, allow_pickle=True)", "allows pickle"),
    (no_code_from_bytes, "hicache_ray.keys", "try:\n    pass\nexcept:\n    pass", "hicache_ray.keys:3 has a bare except"),
]


@pytest.mark.parametrize(("law", "name", "text", "says"), CRIMES)
def test_a_breach_is_seen(law: Law, name: str, text: str, says: str) -> None:
    found = breaches(law, [Module(name, text, package=name == "hicache_ray")])
    assert len(found) == 1
    assert says in found[0]


#: module and text that look like a breach and are none
INNOCENT: list[tuple[str, str]] = [
    ("hicache_ray.cli", "def f():\n    from hicache_ray.actors import cluster"),
    ("hicache_ray.copies_cuda", "def f():\n    import cupy"),
    ("hicache_ray.integrations.transformers.engine", "import transformers\nmodel.eval()"),
    ("hicache_ray.storage.arena", "import time\nfrom hicache_ray.storage import index\nfrom hicache_ray.errors import StoreError"),
    ("hicache_ray.match", "from hicache_ray import lengths"),
]


@pytest.mark.parametrize(("name", "text"), INNOCENT)
def test_what_is_allowed_is_not_flagged(name: str, text: str) -> None:
    assert [s for law in LAWS for s in breaches(law, [Module(name, text)])] == []


def test_a_cycle_is_seen() -> None:
    a, b = Module("hicache_ray.keys", "import hicache_ray.spec"), Module("hicache_ray.spec", "from hicache_ray import keys")
    assert {"hicache_ray.keys", "hicache_ray.spec"} == set(cycle([a, b]))


#: Imports one module after the other and names the first one after which something forbidden is loaded.
PROBE = """
import importlib, json, sys
for name, forbidden in json.loads(sys.stdin.read()):
    importlib.import_module(name)
    if loaded := [library for library in forbidden if library in sys.modules]:
        sys.exit(f"importing {name} loads {loaded}")
print(sorted(name for name in ("actors", "storage") if name in sys.modules))
"""
HEAVY = ["torch", "ray", "transformers", "cupy", "fastapi"]


def light_modules() -> list[tuple[str, list[str]]]:
    """The modules that exist now and must stay free of heavy libraries, with those libraries. The order matters: lightest first."""
    free = [m.name for m in product() if m.layer in ("package", *CORE, "storage", "cli") and m.name != "hicache_ray.pool"]
    lean = {f"hicache_ray.actors.{name}" for name in ("coordinator", "storage", "directory", "gateway")}
    return [(name, HEAVY) for name in free] + [(m.name, ["torch", "transformers"]) for m in product() if m.name in lean]


def run_probe(modules: list[tuple[str, list[str]]], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROBE], input=json.dumps(modules), capture_output=True, text=True, cwd=folder, timeout=240, check=False
    )


def test_the_core_and_the_storage_need_neither_torch_nor_ray(tmp_path: Path) -> None:
    done = run_probe(light_modules(), tmp_path)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_the_probe_sees_a_heavy_import(tmp_path: Path) -> None:
    (tmp_path / "fat.py").write_text("import decimal\n")
    done = run_probe([("hicache_ray.errors", ["decimal"]), ("fat", ["decimal"])], tmp_path)
    assert (done.returncode, done.stderr.strip()) == (1, "importing fat loads ['decimal']")


def test_the_linter_bans_the_folders_by_their_bare_names(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("import storage\nfrom actors.rank import Rank\nfrom hicache_ray.storage import arena\n")
    ruff = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--config",
        str(ROOT / "pyproject.toml"),
        "--select",
        "TID251",
        "--output-format",
        "json",
    ]
    done = subprocess.run([*ruff, "x.py"], capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False)
    assert [f["location"]["row"] for f in json.loads(done.stdout)] == [1, 2]
