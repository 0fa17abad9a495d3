"""Traces of requests: Mooncake's JSON lines, read and checked, and what no cache can do better.

One request per line: ``timestamp`` (milliseconds), ``input_length`` and ``output_length`` (tokens), ``hash_ids`` (one for each block of the
prompt, the last of which may be partial). Equal ids mean equal blocks after equal prefixes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hicache_ray.errors import ConfigError

#: Tokens of a block in the published traces.
BLOCK = 512
#: Tokens of a prompt, milliseconds of a trace: more is a mistake in the file.
MOST_TOKENS, MOST_MS = 1 << 26, 1 << 53
#: Letters of a value that a sentence about it shows.
_SHOWN = 40
_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")


@dataclass(frozen=True)
class Traced:
    """One request of a trace. ``at``: seconds since its beginning. ``tokens``: of the prompt. ``blocks``: identities of its blocks."""

    at: float
    tokens: int
    output: int
    blocks: tuple[int, ...]

    def whole(self, block: int = BLOCK) -> int:
        """Blocks that are whole, and so can be cached."""
        return self.tokens // block

    def cap(self, block: int = BLOCK) -> int:
        """Blocks that a hit can have at most: whole ones, of which at least one token is left to compute."""
        return (self.tokens - 1) // block


def read(file: str, block: int = BLOCK) -> list[Traced]:
    """A whole trace. Raises :class:`ConfigError` with the number of the line that is none."""
    try:
        with Path(file).open(encoding="utf-8") as lines:
            requests = list(parse(lines, file, block))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"the trace {file} cannot be read: {reason}; give a file of JSON lines") from None
    if not requests:
        raise ConfigError(f"the trace {file} has no requests; give a file of JSON lines with the fields {', '.join(_FIELDS)}")
    return requests


def parse(lines: Iterable[str], file: str = "trace", block: int = BLOCK) -> Iterator[Traced]:
    """The requests of a trace; empty lines are none."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield _request(_json(line), block)
            except ConfigError as error:
                raise ConfigError(f"line {number} of {file}: {error}") from None


def _json(line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"this is not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ConfigError("this is no request of a trace: it is nested too deep") from None
    except ValueError:  # Python reads no number of more than some thousand digits
        raise ConfigError("this is no request of a trace: a number in it is too long") from None


def _request(value: Any, block: int) -> Traced:
    missing = [name for name in _FIELDS if name not in value] if isinstance(value, dict) else list(_FIELDS)
    if missing:
        raise ConfigError(f"this is no request of a trace in Mooncake's format; it lacks {', '.join(missing)}")
    at, ids = value["timestamp"], value["hash_ids"]
    if isinstance(at, bool) or not isinstance(at, int | float) or not 0 <= at < MOST_MS:
        raise ConfigError(f"timestamp is {_shown(at)}; it must be milliseconds since the beginning of the trace")
    for name, least in (("input_length", 1), ("output_length", 0)):
        if type(value[name]) is not int or not least <= value[name] <= MOST_TOKENS:
            raise ConfigError(f"{name} is {_shown(value[name])}; it must be a whole number of tokens, from {least} to {MOST_TOKENS}")
    if not isinstance(ids, list) or any(type(i) is not int or not 0 <= i < 1 << 63 for i in ids):
        raise ConfigError("hash_ids must be a list of whole numbers, none negative")
    wanted = -(-value["input_length"] // block)
    if len(ids) != wanted:
        raise ConfigError(
            f"{value['input_length']} tokens are {wanted} blocks of {block} tokens and hash_ids has {len(ids)}; give --block the number of "
            "tokens in a block of this trace"
        )
    return Traced(at / 1000, value["input_length"], value["output_length"], tuple(ids))


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


@dataclass(frozen=True)
class Ceiling:
    """What a trace allows. ``blocks``: of all prompts; ``distinct``: unlike ones that can be cached; ``hits``: what a cache that never
    forgets can serve; ``longest``: blocks of the longest prompt."""

    requests: int
    blocks: int
    distinct: int
    hits: int
    longest: int

    @property
    def hit_ratio(self) -> float:
        return self.hits / self.blocks


def ceiling(requests: Sequence[Traced], block: int = BLOCK) -> Ceiling:
    """By sets alone, without a cache."""
    seen: set[int] = set()
    hits = 0
    for r in requests:
        for i in r.blocks[: r.cap(block)]:
            if i not in seen:
                break
            hits += 1
        seen.update(r.blocks[: r.whole(block)])
    return Ceiling(len(requests), sum(len(r.blocks) for r in requests), len(seen), hits, max((len(r.blocks) for r in requests), default=0))
