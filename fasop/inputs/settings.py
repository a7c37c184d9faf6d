"""Reading the YAML files that users write, with one sentence for each way they can be wrong."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any, NamedTuple

from fasop.errors import PlanError, nearest


class Quantity(NamedTuple):
    """What a number means: its unit, its plausible range, and an example of a right value."""

    unit: str
    least: float
    most: float
    example: str


QUANTITIES = {
    "memory_gib": Quantity("GiB of one GPU", 0.1, 1024, "an 80 GiB GPU is 80"),
    "reserved_gib": Quantity("GiB of one GPU", 0, 1024, "4.8"),
    "price_per_hour": Quantity("$ per node and hour", 0, 10_000, "32.77"),
    "bandwidth": Quantity("bit/s", 1e7, 1e18, "200 Gbit/s is 200e9, 25 GB/s is 200e9"),
    "seconds": Quantity("seconds per step", 1e-6, 1e6, "1.402"),
    "latency": Quantity("seconds per message", 0, 1, "10 µs is 1e-5"),
    "speed": Quantity("times as fast", 1e-3, 1e3, "2.2"),
    "per_gb": Quantity("$ per 10⁹ bytes", 0, 10, "0.02"),
    "bytes": Quantity("bytes per message", 1, 1e12, "1 MB is 1e6"),
}


@functools.cache
def _loader() -> Any:
    # Reading YAML costs start-up time that a plan from presets alone should not pay twice.
    import yaml

    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    def mapping(loader: Any, node: Any, deep: bool = False) -> Any:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen and key.value != "<<":
                message = f"the key {key.value!r} is there twice"
                raise yaml.constructor.ConstructorError(None, None, message, key.start_mark)
            seen.add(key.value)
        loader.flatten_mapping(node)
        return loader.construct_mapping(node, deep=True)

    made: Any = type("UniqueKeys", (base,), {})
    made.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    return made


def read_yaml(path: Path, top: str) -> dict[str, Any]:
    """The mapping under the key ``top`` of a YAML file. Raises ``PlanError``."""
    import yaml

    try:
        document = yaml.load(path.read_text(encoding="utf-8"), _loader())
    except OSError as error:
        raise PlanError(f"{path}: can't be read: {error.strerror or error}.") from None
    except UnicodeDecodeError:
        raise PlanError(f"{path}: not a text file: give YAML with the key '{top}'.") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "unreadable"
        kind = "" if "there twice" in problem else "not YAML: "
        raise PlanError(f"{path}{where}: {kind}{problem}.") from None
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


def number(where: str, value: Any, quantity: str) -> float:
    """A finite number within the range of a ``QUANTITIES`` entry. Raises ``PlanError``.

    YAML 1.1 reads 40e9 as text, so text is accepted.
    """
    unit, least, most, example = QUANTITIES[quantity]
    expected = f"expected {unit} between {least:g} and {most:g} ({example})"
    try:
        result = float(value)
    except (TypeError, ValueError):
        raise PlanError(f"{where}: {value!r} is no number: {expected}.") from None
    if isinstance(value, bool) or not math.isfinite(result) or not least <= result <= most:
        raise PlanError(f"{where}: {value!r}: {expected}.")
    return result


def whole(where: str, value: Any) -> int:
    """A whole number. Raises ``PlanError``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise PlanError(f"{where}: {value!r}: give a whole number.")
    return value


def flag(where: str, value: Any) -> bool:
    """True or false. Raises ``PlanError``."""
    if not isinstance(value, bool):
        raise PlanError(f"{where}: {value!r}: give true or false.")
    return value
