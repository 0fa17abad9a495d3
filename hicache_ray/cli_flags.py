"""Settings on the command line: every setting of the configuration is a flag, named by the configuration itself."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from hicache_ray.config import settings
from hicache_ray.config_sources import Loaded, flag_name, read_sources
from hicache_ray.config_sources import load as load_sources
from hicache_ray.errors import ConfigError


def parse(args: Sequence[str]) -> dict[str, object]:
    """``--flag value`` and ``--flag=value`` as dotted settings. Raises :class:`ConfigError` on anything else."""
    names = {flag_name(name): name for name in settings()}
    out: dict[str, object] = {}
    rest = list(args)
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        if flag not in names:
            near = difflib.get_close_matches(flag, names, 1)
            hint = f"; did you mean {near[0]}?" if near else "; see hicache-ray serve --print-config for all settings"
            raise ConfigError(f"there is no flag {flag}{hint}")
        if not equals:
            if not rest:
                raise ConfigError(f"{flag} needs a value ({names[flag]})")
            value = rest.pop(0)
        out[names[flag]] = value
    return out


def load(file: str | None, flags: Mapping[str, object], args: Sequence[str]) -> Loaded:
    """The checked configuration from defaults, ``file``, environment, and flags; ``flags`` are a command's own defaults."""
    text, env = read_sources(file)
    return load_sources(text, env, {**flags, **parse(args)})
