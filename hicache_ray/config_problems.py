"""What is wrong with a setting, as a sentence that names it, its value, what would be legal, and where the value came from."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from hicache_ray.config import choices, is_secret, sections, setting, settings, tenant_settings

_TEXT = "it must be text; in a file, put it in quotes"
_WHOLE = "it must be a whole number"
_NUMBER = "it must be a number"

#: Type of pydantic's error -> what to do about it. ``{...}`` are filled from the error's context.
_ADVICE: Mapping[str, str] = MappingProxyType(
    {
        "greater_than": "it must be more than {gt:g}",
        "greater_than_equal": "it must be at least {ge:g}",
        "less_than": "it must be less than {lt:g}",
        "less_than_equal": "it must be at most {le:g}",
        "int_type": _WHOLE,
        "int_parsing": _WHOLE,
        "int_parsing_size": _WHOLE,
        "int_from_float": _WHOLE,
        "float_type": _NUMBER,
        "float_parsing": _NUMBER,
        "finite_number": _NUMBER,
        "bool_type": "choose true or false",
        "bool_parsing": "choose true or false",
        "string_type": _TEXT,
        "string_pattern_mismatch": "use at most 48 letters, digits, - and _, the first one a letter or digit",
        "too_short": "it must have at least {min_length} characters",
        "string_too_short": "it must have at least {min_length} characters",
        "value_error": "{error}",
    }
)


def sentences(error: ValidationError, origins: Mapping[str, str]) -> list[str]:
    """One sentence for each thing that is wrong in the tree."""
    return [_sentence(e["type"], e["loc"], e["input"], {"msg": e["msg"], **e.get("ctx", {})}, origins) for e in error.errors()]


def unknown(name: str, origin: str) -> str:
    """The sentence about a setting that does not exist."""
    section, _, field = name.partition(".")
    if section == "tenants":
        legal = f"a tenant has a name and the settings {', '.join(tenant_settings())}, as in tenants.acme.salt"
    elif section not in sections():
        legal = f"the sections are {', '.join(sections())}, tenants"
    else:
        legal = f"the settings of {section} are {', '.join(sections()[section].model_fields)}"
    near = difflib.get_close_matches(name, settings(), n=1, cutoff=0.75) or [n for n in settings() if n.partition(".")[2] == field]
    hint = f"did you mean {near[0]}? " if near else ""
    return f"there is no setting {name} (set by {origin}); {hint}{legal}"


def _sentence(kind: str, loc: tuple[int | str, ...], value: object, context: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    name = ".".join(str(part) for part in loc[: 3 if loc[:1] == ("tenants",) else 2])
    if loc[2:] == ("[key]",):
        return f'tenants has a tenant of the name "{loc[1]}"; {_ADVICE["string_pattern_mismatch"]}'
    if kind == "missing" and setting(name) is not None:
        return f"{name} is missing; every tenant needs one"
    if setting(name) is None:  # a rule between settings: its own text is a whole sentence
        return str(context.get("error", f"{name or 'the configuration'}: {context['msg']}"))
    if kind == "literal_error":
        advice = f"choose one of {', '.join(str(c) for c in choices(name))}"
    else:
        advice = _ADVICE.get(kind, "{msg}").format_map(context)
    origin = origins.get(name, "default")
    return f"{name} is {_shown(name, value)}; {advice}" + ("" if origin == "default" else f" (set by {origin})")


def _shown(name: str, value: object) -> str:
    if is_secret(name):
        return "not as it should be (its value is not shown)"
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."
