"""Memory of this machine as the kernel tells it: the machine's own, and the limits of the control groups that confine this process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from hicache_ray.errors import HiCacheError
from hicache_ray.sizing import Memory, confined

#: cgroup version -> where its memory files are, the files of limit and use, and what of the use the kernel gives back when asked.
_V2 = ("", "memory.max", "memory.current", "inactive_file")
_V1 = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def memory(root: Path = Path("/")) -> Memory:
    """What this process may use. ``root``: of the file system, for tests. Raises :class:`HiCacheError` where the kernel does not tell."""
    try:
        info = _numbers(root / "proc/meminfo", 1024)
        machine = Memory(info["MemTotal"], info["MemAvailable"])
    except (OSError, KeyError, ValueError) as error:
        raise HiCacheError(
            f"the memory of this machine cannot be read from {root / 'proc/meminfo'}: {error}; give --host-memory"
        ) from error
    return confined(machine, _groups(root))


def _groups(root: Path) -> Iterator[Memory]:
    """The control groups around this process, innermost first. In a container the path may be one that only the host knows: then the
    mount's own top is ours."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        version = _V2 if number == "0" and not controllers else _V1 if "memory" in controllers.split(",") else None
        if version is None:
            continue
        top = root / "sys/fs/cgroup" / version[0]
        inner = top / path.lstrip("/")
        while True:
            if (group := _group(inner, *version[1:])) is not None:
                yield group
            if inner == top or top not in inner.parents:
                break
            inner = inner.parent


def _group(folder: Path, limit: str, use: str, reclaimable: str) -> Memory | None:
    try:
        text = (folder / limit).read_text().strip()
        if text == "max":
            return None
        total, used = int(text), int((folder / use).read_text())
    except (OSError, ValueError):
        return None
    with contextlib.suppress(OSError, ValueError):  # where it does not tell, all of it counts as used
        used -= _numbers(folder / "memory.stat", 1).get(reclaimable, 0)
    return Memory(total, max(0, total - max(0, used)), f"control group {folder}")


def _numbers(path: Path, unit: int) -> Mapping[str, int]:
    """``name: 12 kB`` and ``name 12`` lines."""
    rows = (line.replace(":", " ").split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) * unit for row in rows if len(row) > 1 and row[1].isdigit()}
