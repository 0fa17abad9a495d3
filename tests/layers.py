"""The layers of the package as data, and what an import says about them. The laws themselves are in ``test_layering.py``."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

POLICY = ("policies", "policy", "policy_lfu", "policy_order", "policy_priority", "policy_s3fifo", "standing")

#: Layer -> the modules of ``hicache_ray`` in it. A new module is added here, in the lowest layer that can hold it.
MODULES: Mapping[str, tuple[str, ...]] = {
    "vocabulary": (
        *("errors", "config", "config_problems", "config_sizes", "config_sources"),
        *("spec", "templates", "families", "layout", "keys", "records", "settings", "store"),
    ),
    "structures": (
        *("cost", "lengths", "slots", "pool", "index", "lease", "ledger", *POLICY),
        *("residency", "resume", "story", "transfer", "why"),
    ),
    "stages": ("match", "plan", "prefetch", "load", "compute", "insert", "backup", "evict"),
    "cache": ("asking", "cache", "descent", "fetches", "persist", "restore"),
    "group": ("flights", "group", "tales"),
    "tools": (
        *("copies", "copies_cpu", "copies_cuda", "copies_cudart", "copies_fake", "copies_jobs", "copies_kernel", "copies_queues"),
        *("host_memory", "interrupts", "machine", "sizing_plan"),
        *("ask", "digest", "executor", "probe_result", "selftest", "testing", "testing_parts", "testing_questions", "testing_queues"),
        *("explain", "explain_fields", "metrics", "replay", "simulate", "sizing", "trace"),
        *("simulate_cases", "simulate_checks", "simulate_content", "simulate_drop", "simulate_engine", "simulate_faults"),
        *("simulate_group", "simulate_load", "simulate_node", "simulate_rank", "simulate_report", "simulate_rule", "simulate_settings"),
        *("simulate_shards", "simulate_store", "simulate_watch"),
    ),
    "cli": ("cli", "cli_admin", "cli_flags", "cli_out", "cli_plot", "cli_replay", "cli_sim", "cli_size", "cli_tables", "cli_verify"),
}
#: Layers that are a folder: everything in it belongs to them.
FOLDERS = ("storage", "integrations", "verify", "actors")

#: The layers that decide and perform nothing.
CORE = ("vocabulary", "structures", "stages", "cache", "group")
#: Layer -> the layers it may import. Stages do not import each other; ``package`` is ``hicache_ray/__init__.py``.
MAY_IMPORT: Mapping[str, tuple[str, ...]] = {
    "package": ("vocabulary",),
    "vocabulary": ("vocabulary",),
    "structures": ("vocabulary", "structures"),
    "stages": ("vocabulary", "structures"),
    "cache": ("vocabulary", "structures", "stages", "cache"),
    "group": ("vocabulary", "structures", "stages", "cache", "group"),
    "storage": ("vocabulary", "storage"),
    "tools": (*CORE, "tools", "storage"),
    "integrations": (*CORE, "tools", "integrations"),
    "verify": (*CORE, "tools", "storage", "integrations", "verify"),
    "actors": (*CORE, "tools", "storage", "integrations", "actors", "package"),
    "cli": (*CORE, "tools", "storage", "integrations", "verify", "actors", "cli", "package"),
    "examples": (*CORE, "tools", "storage", "integrations", "actors", "examples", "package"),
}

#: Library -> the layers and the single modules that may import it.
LIBRARIES: Mapping[str, tuple[str, ...]] = {
    "ray": ("actors", "examples"),
    "fastapi": ("actors", "examples"),
    "starlette": ("actors", "examples"),
    "uvicorn": ("actors", "examples"),
    "torch": ("hicache_ray.pool", "hicache_ray.copies", "hicache_ray.copies_cuda", "integrations"),
    "transformers": ("integrations",),
    "accelerate": ("integrations",),
    "safetensors": ("integrations",),
    "cupy": ("hicache_ray.copies_cuda",),
    "typer": ("cli",),
    "rich": ("cli",),
    "matplotlib": ("hicache_ray.cli_plot",),
}
#: The core has no clock, no chance, no network and no processes of its own.
AMBIENT = (
    *("asyncio", "datetime", "http", "httpx", "multiprocessing", "random", "requests", "secrets"),
    *("selectors", "socket", "subprocess", "tempfile", "time", "urllib", "uuid"),
)
#: Nothing stored or received is ever run.
CODE_FROM_BYTES = ("cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve")


@dataclass(frozen=True)
class Module:
    """One source file. ``name`` is the name it must be imported by."""

    name: str
    source: str
    package: bool = False

    @property
    def layer(self) -> str | None:
        """Its layer; None where nobody has given it one."""
        return layer_of(self.name)


@dataclass(frozen=True)
class Import:
    """One imported name. ``lazy``: inside a function, so that importing the module does not run it."""

    target: str
    line: int
    lazy: bool


def layer_of(name: str) -> str | None:
    """The layer of the module ``name``; None where it is not one of ours or has none."""
    first, _, rest = name.partition(".")
    if first == "examples":
        return "examples"
    if first != "hicache_ray":
        return None
    part = rest.partition(".")[0]
    if not part:
        return "package"
    return part if part in FOLDERS else next((layer for layer, modules in MODULES.items() if part in modules), None)


def product() -> list[Module]:
    """Every module of the package and the examples, as it is on disk now. The symlinks are not followed: each file appears once."""
    found = []
    for folder, prefix in (("hicache_ray", ""), ("actors", "hicache_ray."), ("storage", "hicache_ray."), ("examples", "")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if folder == "hicache_ray" and len(parts) > 1 and parts[1] in ("actors", "storage"):
                continue
            package = parts[-1] == "__init__"
            found.append(Module(prefix + ".".join(parts[:-1] if package else parts), path.read_text(encoding="utf-8"), package))
    return found


def imports(module: Module, known: frozenset[str]) -> list[Import]:
    """What a module imports, with relative names resolved. ``from a import b`` names ``a.b`` where that is a module."""
    return list(_imports(ast.parse(module.source), module, known, lazy=False))


def _imports(node: ast.AST, module: Module, known: frozenset[str], lazy: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno, lazy) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            base = _absolute(child, module)
            for alias in child.names:
                full = f"{base}.{alias.name}"
                is_module = full in known or (base == "hicache_ray" and layer_of(full) is not None)
                yield Import(full if is_module else base, child.lineno, lazy)
        else:
            yield from _imports(child, module, known, lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))


def _absolute(node: ast.ImportFrom, module: Module) -> str:
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    parts = parts[: len(parts) - node.level + module.package]
    return ".".join([*parts, node.module] if node.module else parts)
