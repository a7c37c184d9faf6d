"""What GPUs are: ``gpus.json``, with a source for each, or a datasheet of one's own in the same form."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chakra_et.cost.units import parse_bandwidth, parse_rate
from chakra_et.errors import TraceError
from chakra_et.files import read_json
from chakra_et.yaml_file import read_yaml

FILE = Path(__file__).with_name("gpus.json")
_TABLE: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))["gpus"]
SUFFIXES = (".json", ".yaml", ".yml")  # of datasheets
_NEEDED = ("vendor", "units", "clock", "watts", "cache", "memory", "kind", "peaks")
_CHOICES = {"vendor": ("nvidia", "amd"), "kind": ("HBM", "GDDR"), "like": ("", *_TABLE)}
_PEAKS = ("16 bit", "8 bit", "4 bit", "tf32", "float", "double")
_COUNT, _BYTES = {"": 1.0}, {"KB": 1e3, "MB": 1e6}
# Units and default (none: required) of each number of a datasheet.
_NUMBERS: dict[str, tuple[dict[str, float], str]] = {
    **{"units": (_COUNT, ""), "watts": ({"": 1.0, "W": 1.0}, ""), "parts": (_COUNT, "1")},
    **{"clock": ({"MHz": 1e6, "GHz": 1e9}, ""), "cache": (_BYTES, ""), "near": (_BYTES, "128 KB")},
    "threads": (_COUNT, "2048"),
}
_PRECISIONS = {"double": ("double",), "float": ("float",), "tf32": ("tf32", "float"), "8 bit": ("8 bit",)}


@dataclass(frozen=True)
class Gpu:
    """``units`` (streaming multiprocessors or compute units) at ``clock`` Hz, power limit in ``watts``,
    ``cache`` bytes before memory in ``parts`` that each keep their own copies, ``memory`` bytes per second of
    ``kind`` HBM or GDDR, and ``peaks``: dense operations per second by type of number. ``like``: the GPU
    whose measured shapes stand for this one's. ``measured``: parameters of its own, by kind of kernel.
    ``threads`` and ``near`` (bytes of L1): of a unit.
    """

    name: str
    vendor: str
    units: int
    clock: float
    watts: float
    cache: float
    memory: float
    kind: str
    peaks: Mapping[str, float]
    parts: int = 1
    like: str = ""
    measured: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    threads: int = 2048
    near: float = 128e3

    def peak(self, type_name: str) -> float:
        """Operations per second of matrix products of this type of number."""
        known = (self.peaks[name] for name in _PRECISIONS.get(type_name, ()) if name in self.peaks)
        return next(known, self.peaks["16 bit"])

    def __hash__(self) -> int:
        return hash(self.name)


def gpu(name: str) -> Gpu:
    """The GPU ``name`` of the table, in any case, or of a datasheet's file. Raises ``TraceError``."""
    if name.endswith(SUFFIXES):
        return datasheet(Path(name))
    known = {key.lower(): key for key in names()}
    short = re.sub(r"[\s_]", "", name).lower()
    if short not in known:
        raise TraceError(
            f"GPU {name!r} is unknown: use one of {', '.join(names())}, or a file of a datasheet"
        )
    return read(known[short], _TABLE[known[short]])


def datasheet(path: Path) -> Gpu:
    """The GPU that a JSON or YAML file describes as ``gpus.json`` does, with its ``name``, or a file of
    ``chakra-et measure-gpu``. Raises ``TraceError``."""
    try:
        entry = read_json(path) if path.suffix == ".json" else read_yaml(path)
        if not isinstance(entry, dict) or not isinstance(entry.get("peaks", {}), dict):
            raise TraceError("no datasheet of a GPU: give settings and peaks as 'name: value'")
        _check(entry)
        return read(str(entry.get("name", path.stem)), entry)
    except (OSError, ImportError, ValueError, TypeError, AttributeError) as error:
        raise TraceError(f"{path}: {re.sub(rf'^{re.escape(str(path))}[:,] ', '', str(error))}") from error


def _check(entry: Mapping[str, Any]) -> None:
    known = {*_NEEDED, *_CHOICES, *_NUMBERS, "name", "called", "source", "measured", "shapes", "held"}
    peaks = entry.get("peaks", {})
    for words, wrong in (
        ("lacks", {*_NEEDED} - {*entry}),
        ("has no setting", {*entry} - known),
        ("lacks, of dense products, the peak", {"16 bit"} - {*peaks}),
        (f"has the peaks {', '.join(_PEAKS)}, not", {*peaks} - {*_PEAKS}),
    ):
        if wrong:
            raise TraceError(f"the datasheet {words} {', '.join(sorted(map(str, wrong)))}")
    for key, choices in _CHOICES.items():
        if entry.get(key, choices[0]) not in choices:
            raise TraceError(f"{key} {entry[key]!r} is unknown: use {' or '.join(filter(None, choices))}")


def by_driver(text: str) -> str | None:
    """The GPU of the table that a driver's name means, as "NVIDIA A100-SXM4-80GB": not A10 for A100, nor B200
    for GB200, in any case. None for none.
    """
    found = []
    for name, entry in _TABLE.items():
        words = entry.get("called") or re.sub(r"(?<=[A-Z])(?=\d)", r"\\s?", name)
        if match := re.search(rf"(?<![A-Za-z0-9]){words}(?![A-Za-z0-9])", text, re.IGNORECASE):
            found.append((match.end() - match.start(), name))
    return max(found)[1] if found else None


def names() -> list[str]:
    """All GPUs of the table."""
    return list(_TABLE)


def entry(name: str) -> dict[str, Any]:
    """What ``gpus.json`` says of a GPU."""
    return dict(_TABLE[name])


def read(name: str, entry: Mapping[str, Any]) -> Gpu:
    """A GPU from an entry in the form of ``gpus.json``; ``name``: "" for the entry's own. Raises
    ``TraceError``.
    """
    return Gpu(
        name=name or str(entry["name"]),
        memory=parse_bandwidth(str(entry["memory"])),
        peaks={kind: parse_rate(str(text)) for kind, text in entry["peaks"].items()},
        **{
            key: _number(key, str(entry.get(key, default)), units)
            for key, (units, default) in _NUMBERS.items()
        },
        **{key: entry[key] for key in (*_CHOICES, "measured") if key in entry},
    )


def _number(key: str, text: str, units: Mapping[str, float]) -> Any:
    """``1830 MHz`` in Hz, ``50 MB`` in bytes, counts as they are."""
    found = re.fullmatch(r"(\d+\.?\d*) ?([A-Za-z]*)", text)
    if not found or found[2] not in units or not float(found[1]) > 0:
        unit = f" in {' or '.join(filter(None, units))}" if units is not _COUNT else ""
        raise TraceError(f"{key} {text!r}: give a number above 0{unit}")
    return int(found[1]) if units is _COUNT else float(found[1]) * units[found[2]]
