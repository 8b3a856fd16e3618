"""JSON files that are written by programs and read in diffs: a line for each entry of a table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def dump(about: Mapping[str, Any]) -> str:
    """An object as text: a line for each member, and for each entry of those that are tables."""
    members = ",\n".join(map(_member, about.items()))
    return f"{{\n{members}\n}}\n"


def _member(item: tuple[str, Any]) -> str:
    name, value = item
    if not isinstance(value, dict) or not value:
        return f"{json.dumps(name)}: {json.dumps(value)}"
    rows = ",\n".join(f" {json.dumps(key)}: {json.dumps(entry)}" for key, entry in value.items())
    return f"{json.dumps(name)}: {{\n{rows}\n}}"
