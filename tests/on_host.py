"""The kernel's source compiled as plain C++: its index arithmetic runs on memory without a GPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from hicache_ray.copies_jobs import Pages
from hicache_ray.copies_kernel import SOURCE, WIDTHS, launches

#: Copies pages now, as the kernel would.
OnHost = Callable[[Pages], None]


def compiler() -> str | None:
    return shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")


@pytest.fixture(scope="session")
def kernel_on_host(tmp_path_factory: pytest.TempPathFactory) -> OnHost:
    found = compiler()
    if found is None:
        return lambda _: pytest.skip("no C++ compiler here to run the kernel's arithmetic on the CPU with")
    folder = tmp_path_factory.mktemp("kernel")
    return load(build(found, SOURCE, folder))


def build(compiler: str, source: str, folder: Path) -> Path:
    (folder / "kernel.cpp").write_text(source)
    library = folder / "kernel.so"
    # An unaligned or overflowing access ends the process instead of working by chance.
    checks = ["-fsanitize=alignment,signed-integer-overflow", "-fsanitize-undefined-trap-on-error"]
    command = [compiler, "-O1", "-Wall", "-Werror", *checks, "-shared", "-fPIC", "-o", str(library), str(folder / "kernel.cpp")]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return library


def load(library: Path) -> OnHost:
    loaded = ctypes.CDLL(str(library))
    functions = {width: getattr(loaded, f"hc_copy_host_{width}") for width in WIDTHS}
    for function in functions.values():
        function.restype, function.argtypes = None, [ctypes.c_void_p] * 2 + [ctypes.c_longlong] * 15

    def copy(pages: Pages) -> None:
        for launch in launches(pages):
            functions[launch.width](pages.of.ctypes.data, pages.to.ctypes.data, *launch.numbers)

    return copy
