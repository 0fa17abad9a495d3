"""Where settings come from: defaults < YAML file < environment ``HICACHE__SECTION__NAME`` < flags.

Nothing here looks around by itself except :func:`read_sources`, the one place that opens the file and reads the environment.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import yaml
from pydantic import SecretStr, ValidationError

from hicache_ray.config import Config, choices, is_optional, is_size, setting, settings, tenant_settings
from hicache_ray.config_problems import sentences, unknown
from hicache_ray.config_sizes import format_size
from hicache_ray.errors import ConfigError

ENV_PREFIX = "HICACHE__"
#: Origin of a value that nobody set.
DEFAULT = "default"
#: What stands for a secret that is set.
HIDDEN = "********"

#: One source, flattened: (dotted name, value, origin).
_Items: TypeAlias = Iterator[tuple[str, object, str]]

#: Flags that are not spelled by the rule of :func:`flag_name`.
_FLAGS: Mapping[str, str] = MappingProxyType({"model.family": "--model", "model.path": "--model-path"})


@dataclass(frozen=True)
class FileText:
    """A configuration file that has been read."""

    path: str
    text: str


@dataclass(frozen=True)
class Loaded:
    """A checked configuration. ``origins``: dotted name -> ``default``, ``file PATH``, ``env NAME`` or ``flag --x``, for every setting."""

    config: Config
    origins: Mapping[str, str]


@dataclass(frozen=True)
class Row:
    """One line of ``--print-config``. Secrets are masked in ``value``."""

    name: str
    value: str
    origin: str


def read_sources(path: str | None) -> tuple[FileText | None, Mapping[str, str]]:
    """The file (None: no file) and the part of the environment that concerns us. Raises ConfigError when the file cannot be read."""
    env = {name: value for name, value in os.environ.items() if name.startswith(ENV_PREFIX)}
    if path is None:
        return None, env
    try:
        return FileText(path, Path(path).read_text(encoding="utf-8")), env
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration file {path} cannot be read: {error}; name a YAML file in UTF-8") from None


def load(file: FileText | None = None, env: Mapping[str, str] | None = None, flags: Mapping[str, object] | None = None) -> Loaded:
    """Merge the sources and check the result. A flag whose value is None was not given.

    Raises ConfigError with one sentence (a line each) for everything that is wrong.
    """
    values: dict[str, object] = {}
    origins = dict.fromkeys(settings(), DEFAULT)
    problems = []
    for source in (_from_file(file), _from_env(env or {}), _from_flags(flags or {})):
        for name, value, origin in source:
            if setting(name) is None:
                problems.append(unknown(name, origin))
                continue
            values[name], origins[name] = value, origin
    if problems:
        raise ConfigError("\n".join(problems))
    config = _build(values, origins)
    for name in tenant_names(config):
        origins.setdefault(name, DEFAULT)
    return Loaded(config, origins)


def tenant_names(config: Config) -> list[str]:
    """Dotted names of the settings of the tenants that there are."""
    return [f"tenants.{tenant}.{field}" for tenant in config.tenants for field in tenant_settings()]


def changed(config: Config, values: Mapping[str, object]) -> Config:
    """``config`` with some settings (dotted names) replaced, checked like the original."""
    if wrong := [unknown(name, "the caller") for name in values if setting(name) is None]:
        raise ConfigError("\n".join(wrong))
    return _build({name: _value(config, name) for name in (*settings(), *tenant_names(config))} | dict(values), {})


def render(loaded: Loaded) -> list[Row]:
    """Every setting with its value, secrets masked, and its origin."""
    return [Row(name, _text(name, _value(loaded.config, name)), origin) for name, origin in loaded.origins.items()]


def masked(config: Config) -> dict[str, dict[str, Any]]:
    """The tree as plain JSON values, secrets masked: what an operator may see."""
    return _tree({name: _hide(_value(config, name)) for name in (*settings(), *tenant_names(config))})


def reference() -> str:
    """A Markdown table of all settings: name, default, legal values or meaning. The README carries it."""
    default = Config()
    lines = ["| setting | default | meaning |", "|---|---|---|"]
    for name, field in settings().items():
        legal = ", ".join(f"`{value}`" for value in choices(name))
        meaning = f"{legal}: {field.description}" if legal else field.description
        lines.append(f"| `{name}` | `{_text(name, _value(default, name))}` | {meaning} |")
    for name, field in tenant_settings().items():
        value = "" if field.is_required() else "`null`"
        lines.append(f"| `tenants.NAME.{name}` | {value} | {field.description} |")
    return "\n".join(lines) + "\n"


def flag_name(name: str) -> str:
    """How a setting is spelled on the command line: ``cache`` and ``model`` go without their section, the others with it."""
    section, field = name.split(".")
    spelled = field if section in ("cache", "model") else f"{section}_{field}"
    return _FLAGS.get(name, f"--{spelled.replace('_', '-')}")


def env_name(name: str) -> str:
    """The environment variable of a setting."""
    return ENV_PREFIX + name.replace(".", "__").upper()


def _from_file(file: FileText | None) -> _Items:
    if file is None:
        return
    tree = _parse(file)
    if not isinstance(tree or {}, dict):
        raise ConfigError(f"{file.path} must hold sections with settings, such as 'cache:' with 'page_size: 64' indented below it")
    for section, fields in (tree or {}).items():
        if not isinstance(fields or {}, dict):
            raise ConfigError(f"{section} in {file.path} must hold settings, one 'name: value' on each line, indented below it")
        for name, value in (fields or {}).items():
            if section == "tenants":
                yield from _tenant(file, name, value)
            else:
                yield f"{section}.{name}", value, f"file {file.path}"


def _tenant(file: FileText, tenant: object, fields: object) -> _Items:
    if not isinstance(fields, dict) or not fields:
        raise ConfigError(f"tenants.{tenant} in {file.path} must hold settings, such as 'salt: ...' indented below it")
    for name, value in fields.items():
        yield f"tenants.{tenant}.{name}", value, f"file {file.path}"


def _parse(file: FileText) -> Any:
    """The file's YAML. The error tells where and what, without PyYAML's excerpt of the text, which may show a secret."""
    try:
        return yaml.safe_load(file.text)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{file.path} is not valid YAML{line}: {error.problem}") from None
    except yaml.YAMLError:
        raise ConfigError(f"{file.path} is not valid YAML: it holds characters that are not text") from None


def _from_env(env: Mapping[str, str]) -> _Items:
    for variable in sorted(v for v in env if v.startswith(ENV_PREFIX)):
        name = variable.removeprefix(ENV_PREFIX).lower().replace("__", ".", 1)
        if name.startswith("tenants."):  # whose names are in lower case where they come from here
            name = ".".join(name.rsplit("__", 1))
        yield name, _unset_or(name, env[variable]), f"env {variable}"


def _from_flags(flags: Mapping[str, object]) -> _Items:
    for name, value in flags.items():
        if value is not None:
            yield name, _unset_or(name, value), f"flag {flag_name(name) if name in settings() else name}"


def _unset_or(name: str, value: object) -> object:
    """``null`` and the empty text unset a setting that may be null; files have null itself."""
    return None if setting(name) is not None and is_optional(name) and value in ("", "null") else value


def _build(values: Mapping[str, object], origins: Mapping[str, str]) -> Config:
    try:
        return Config.model_validate(_tree(values))
    except ValidationError as error:
        problems = sentences(error, origins)
    raise ConfigError("\n".join(problems))  # outside the handler: pydantic's own text shows values, secrets among them


def _tree(values: Mapping[str, object]) -> dict[str, dict[str, Any]]:
    """Dotted names as sections with settings, tenants as a section of sections."""
    out: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        section, rest = name.split(".", 1)
        if section == "tenants":
            tenant, rest = rest.rsplit(".", 1)
            out.setdefault(section, {}).setdefault(tenant, {})[rest] = value
        else:
            out.setdefault(section, {})[rest] = value
    return out


def _value(config: Config, name: str) -> Any:
    section, field = name.split(".", 1)
    if section == "tenants":
        tenant, field = field.rsplit(".", 1)
        return getattr(config.tenants[tenant], field)
    return getattr(getattr(config, section), field)


def _hide(value: Any) -> Any:
    if isinstance(value, SecretStr):
        return HIDDEN if value.get_secret_value() else ""
    return value


def _text(name: str, value: Any) -> str:
    shown = _hide(value)
    if shown is None or isinstance(shown, bool):
        return {None: "null", True: "true", False: "false"}[shown]
    if shown == "":
        return '""'
    return format_size(shown) if is_size(name) else str(shown)
