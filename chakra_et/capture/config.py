"""The tracing flags, and the rules for trace names.

    config = TraceConfig(enable_tracing=True, trace_output_dir="outputs", trace_active_steps=1)
    check_trace_name("my run 1")

Flags and fields are the same names; ``cli.parse`` refuses a value out of range.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from chakra_et.cli import option

_PUNCTUATION = " ._-+=@,()"
# Leaves room for _rankN, the side and .json.gz within the 255 bytes of a file name.
_MAX_BYTES = 180


@dataclass
class TraceConfig:
    """The tracing flags. The defaults need six steps."""

    enable_tracing: bool = option("record host and device traces of every rank", False)
    trace_output_dir: str = option("folder for the traces", "outputs")
    trace_name: str | None = option("base name of the trace files (default: model and process count)", None)
    trace_wait_steps: int = option("steps before the profiler starts", 2, least=0)
    trace_warmup_steps: int = option("steps with the profiler running but not recording", 1, least=0)
    trace_active_steps: int = option("steps to record", 3, least=1)
    trace_gzip: bool = option("compress the traces (.json.gz)", False)
    trace_memory: bool = option("also record memory allocations and frees", False)

    def __post_init__(self) -> None:
        if self.trace_name is not None:
            check_trace_name(self.trace_name)
        if not self.trace_output_dir:
            raise ValueError("--trace-output-dir is empty: give a folder")

    def arguments(self) -> dict[str, Any]:
        """Those of ``ChakraTracer``."""
        own = {each.name.removeprefix("trace_"): getattr(self, each.name) for each in fields(TraceConfig)[1:]}
        own["trace_name"] = own.pop("name")
        return own


# The environment variables of ``chakra-et run`` but for CHAKRA_TRACE, and the field that each sets.
VARIABLES = {
    "CHAKRA_TRACE_" + each.name.split("_")[1].upper(): each
    for each in fields(TraceConfig)
    if each.name.startswith("trace_") and isinstance(each.default, int)
}


def config_from_environment(environment: Mapping[str, str]) -> TraceConfig:
    """The configuration that CHAKRA_TRACE and ``VARIABLES`` give. Raises ValueError naming the variable."""
    given = environment.get("CHAKRA_TRACE", "")
    place = Path(given)
    if given.endswith("/"):
        raise ValueError(f"CHAKRA_TRACE={given}: has no name for the trace files: give {given}my_run.")
    if not place.name:
        raise ValueError(
            "CHAKRA_TRACE is not set: give FOLDER/NAME of the trace files, such as outputs/my_run."
        )
    values: dict[str, Any] = {}
    for name, field in VARIABLES.items():
        if name in environment:
            value, least = environment[name], field.metadata.get("least", 0)
            if not value.isascii() or not value.isdecimal() or int(value) < least:
                raise ValueError(f"{name}={value}: must be a whole number of at least {least}.")
            values[field.name] = bool(int(value)) if field.default is False else int(value)
    return TraceConfig(True, str(place.parent), place.name, **values)


def check_trace_name(name: str) -> str:
    """Return ``name``, or raise ValueError if it is not a plain file name.

    Allowed: letters and digits of any script, spaces and a few punctuation marks; no path, no leading dot or
    dash, and no ending such as _rank1, which marks the files of another rank.
    """
    shown = repr(name if len(name) <= 60 else name[:57] + "…")
    if not name or name != name.strip() or name[0] in ".-":
        raise ValueError(
            f"trace name {shown} is empty, starts with a dot, a dash or a space, or ends with a space"
        )
    if bad := sorted(x for x in {*name} - {*_PUNCTUATION} if unicodedata.category(x)[0] not in "LNM"):
        raise ValueError(
            f"trace name {shown} contains {', '.join(map(repr, bad))}: use letters, digits, spaces and "
            f"{_PUNCTUATION.strip()} (the folder is given separately)"
        )
    if re.search(r"_rank\d+$", name):
        raise ValueError(f"trace name {shown} ends like the files of another rank: omit the _rank…")
    if len(name.encode()) > _MAX_BYTES:
        raise ValueError(f"trace name {shown} is longer than {_MAX_BYTES} bytes")
    return name
