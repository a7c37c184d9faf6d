"""Reading the YAML files that users write, with one sentence for each way they can be wrong."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from fasop.errors import PlanError, nearest


def read_yaml(path: Path, top: str) -> dict[str, Any]:
    """The mapping under the key ``top`` of a YAML file. Raises ``PlanError``."""
    # Reading YAML costs start-up time that a plan from presets alone should not pay twice.
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), loader)
    except OSError as error:
        raise PlanError(f"{path}: can't be read: {error.strerror or error}.") from None
    except UnicodeDecodeError:
        raise PlanError(f"{path}: not a text file: give YAML with the key '{top}'.") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise PlanError(
            f"{path}{where}: not YAML: {getattr(error, 'problem', None) or 'unreadable'}."
        ) from None
    if not isinstance(document, dict) or not isinstance(document.get(top), dict) or not document[top]:
        raise PlanError(f"{path}: no entries under the key '{top}'.")
    entries: dict[str, Any] = document[top]
    return entries


def read_mapping(where: str, entry: Any, known: list[str]) -> dict[str, Any]:
    """``entry`` as a dict with known keys only. Raises ``PlanError``."""
    if not isinstance(entry, dict):
        raise PlanError(f"{where}: expected settings as 'name: value', got {entry!r}.")
    for key in entry:
        if key not in known:
            raise PlanError(f"{where}: unknown setting {key!r}: {nearest(str(key), known)}")
    return dict(entry)


def number(where: str, value: Any, positive: bool = True) -> float:
    """A finite number; YAML 1.1 reads 40e9 as text, so text is accepted. Raises ``PlanError``."""
    try:
        result = float(value)
    except (TypeError, ValueError):
        raise PlanError(f"{where}: {value!r} is no number.") from None
    if isinstance(value, bool) or not math.isfinite(result) or result < 0 or (positive and result == 0):
        raise PlanError(f"{where}: {value!r}: give a number {'above' if positive else 'of at least'} 0.")
    return result


def whole(where: str, value: Any) -> int:
    """A whole number. Raises ``PlanError``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise PlanError(f"{where}: {value!r}: give a whole number.")
    return value
