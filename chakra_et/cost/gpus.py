"""What GPUs are: ``gpus.json``, with a source for each, or a datasheet of one's own in the same form."""

from __future__ import annotations

import json
import math
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
_NEEDED = ("vendor", "units", "clock", "watts", "cache", "memory", "kind", "peaks")
_KNOWN = {"vendor": ("nvidia", "amd"), "kind": ("HBM", "GDDR")}
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
    """The GPU ``name`` of the table, in any case. Raises ``TraceError``."""
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
        entry = read_yaml(path) if path.suffix in (".yaml", ".yml") else read_json(path)
        missing = [key for key in _NEEDED if key not in entry]
        if missing:
            raise TraceError(f"{path}: the datasheet lacks {', '.join(missing)}")
        for key, known in _KNOWN.items():
            if entry[key] not in known:
                raise TraceError(f"{path}: {key} {entry[key]!r} is unknown: use {' or '.join(known)}")
        for key in ("units", "watts"):
            if not 0 < float(entry[key]) < math.inf:
                raise TraceError(f"{path}: {key} {entry[key]!r} must be above 0")
        if "16 bit" not in entry["peaks"]:
            raise TraceError(f"{path}: the datasheet's peaks lack '16 bit', of dense matrix products")
        return read(str(entry.get("name", path.stem)), entry)
    except (OSError, ImportError, ValueError, TypeError, AttributeError) as error:
        raise TraceError(f"{path}: no datasheet of a GPU: {error}") from error


def by_driver(text: str) -> str | None:
    """The GPU of the table that a driver's name means, as "NVIDIA A100-SXM4-80GB": not A10 for A100, nor B200
    for GB200. None for none.
    """
    found = [(match.end() - match.start(), each) for each in names() if (match := _called(each, text))]
    return max(found)[1] if found else None


def names() -> list[str]:
    """All GPUs of the table."""
    return list(_TABLE)


def _called(name: str, text: str) -> re.Match[str] | None:
    words = _TABLE[name].get("called") or re.sub(r"(?<=[A-Z])(?=\d)", r"\\s?", name)
    return re.search(rf"(?<![A-Za-z0-9]){words}(?![A-Za-z0-9])", text)


def entry(name: str) -> dict[str, Any]:
    """What ``gpus.json`` says of a GPU."""
    return dict(_TABLE[name])


def read(name: str, entry: Mapping[str, Any]) -> Gpu:
    """A GPU from an entry in the form of ``gpus.json``; ``name``: "" for the entry's own."""
    return Gpu(
        name or str(entry["name"]),
        entry["vendor"],
        int(entry["units"]),
        float(entry["clock"].removesuffix(" MHz")) * 1e6,
        float(entry["watts"]),
        float(entry["cache"].removesuffix(" MB")) * 1e6,
        parse_bandwidth(entry["memory"]),
        entry["kind"],
        {kind: parse_rate(text) for kind, text in entry["peaks"].items()},
        int(entry.get("parts", 1)),
        entry.get("like", ""),
        entry.get("measured", {}),
        int(entry.get("threads", 2048)),
        float(entry.get("near", "128 KB").removesuffix(" KB")) * 1e3,
    )
