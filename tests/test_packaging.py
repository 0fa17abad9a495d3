"""What is installed: the folders at the top arrive inside the package, and nothing generic lands beside it."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

FOLDERS = ("actors", "storage")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> zipfile.ZipFile:
    """A wheel built from a copy of the tree: setuptools leaves ``build/`` behind, and would pack what an earlier build left there."""
    copy = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(repository / name, copy)
    for name in ("hicache_ray", *FOLDERS):
        shutil.copytree(repository / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    target = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(target)]
    done = subprocess.run([*build, str(copy)], capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = target.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_folders_are_reached_through_relative_links(repository: Path) -> None:
    for name in FOLDERS:
        link = repository / "hicache_ray" / name
        assert link.is_symlink()
        assert os.readlink(link) == f"../{name}"
        assert not (repository / name).is_symlink()


def test_the_wheel_holds_the_package_and_nothing_beside_it(wheel: zipfile.ZipFile) -> None:
    assert {name.partition("/")[0].partition("-")[0] for name in wheel.namelist()} == {"hicache_ray"}


def test_the_wheel_holds_every_source_file(wheel: zipfile.ZipFile, repository: Path) -> None:
    sources = [p for folder in ("hicache_ray", *FOLDERS) for p in (repository / folder).rglob("*.py")]
    wanted = set()
    for path in sources:
        name = path.relative_to(repository).as_posix()
        wanted.add(f"hicache_ray/{name}" if name.startswith(FOLDERS) else name)
    assert {name for name in wheel.namelist() if name.endswith(".py")} == wanted
    assert "hicache_ray/py.typed" in wheel.namelist()


def test_a_folder_with_code_is_a_package(repository: Path) -> None:
    folders = {p.parent for top in ("hicache_ray", *FOLDERS) for p in (repository / top).rglob("*.py")}
    assert [str(f.relative_to(repository)) for f in sorted(folders) if not (f / "__init__.py").is_file()] == []


def test_the_wheel_carries_command_licence_and_version(wheel: zipfile.ZipFile) -> None:
    (info,) = {name.partition("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
    scripts = configparser.ConfigParser()
    scripts.read_string(wheel.read(f"{info}/entry_points.txt").decode())
    assert dict(scripts["console_scripts"]) == {"hicache-ray": "hicache_ray.cli:main"}
    assert b"Apache License" in wheel.read(f"{info}/licenses/LICENSE")
    metadata = wheel.read(f"{info}/METADATA").decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: >=3.10" in metadata


def test_the_pins_are_exact_and_name_no_build(repository: Path) -> None:
    lines = [line for line in (repository / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert [line for line in lines if "==" not in line.partition(";")[0] or "+" in line] == []
    assert "torch==2.13.0" in lines
