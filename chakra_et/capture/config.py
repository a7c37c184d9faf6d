"""The tracing flags, and which names a trace may have."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, field
from typing import Any

_PUNCTUATION = " ._-+=@,()"
# Leaves room for _rank…, the kind, .json.gz.partial in the 255 bytes of a file name.
_MAX_BYTES = 180


def _flag(default: Any, help_text: str) -> Any:
    return field(default=default, metadata={"help": help_text})


@dataclass
class TraceConfig:
    """The tracing flags. Ten steps are enough for the defaults."""

    enable_tracing: bool = _flag(False, "record Chakra host and device traces")
    trace_output_dir: str = _flag("outputs", "folder of the traces")
    trace_name: str | None = _flag(None, "base name of the trace files (default: model and process count)")
    trace_wait_steps: int = _flag(2, "steps before the profiler is set up")
    trace_warmup_steps: int = _flag(1, "steps with the profiler set up but not recording")
    trace_active_steps: int = _flag(3, "steps to record")
    trace_gzip: bool = _flag(False, "compress the traces (.json.gz)")

    def __post_init__(self) -> None:
        if self.trace_name is not None:
            check_trace_name(self.trace_name)
        for name, least in (("trace_wait_steps", 0), ("trace_warmup_steps", 0), ("trace_active_steps", 1)):
            if getattr(self, name) < least:
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag} must be at least {least}, not {getattr(self, name)}")
        if not self.trace_output_dir:
            raise ValueError("--trace-output-dir must name a folder")


def check_trace_name(name: str) -> str:
    """Return ``name``, or raise ValueError where it would leave its folder or mislead a reader of it.

    Letters and digits of any script, spaces and a few marks; no path, no leading dot or dash, and no
    ending that reads as another rank's file.
    """
    shown = repr(name if len(name) <= 60 else name[:57] + "…")
    if not name or name != name.strip() or name[0] in ".-":
        raise ValueError(
            f"trace name {shown} is empty, begins with a dot, a dash or a space, or ends with a space"
        )
    bad = sorted({letter for letter in name if not _is_sensible(letter)})
    if bad:
        raise ValueError(
            f"trace name {shown} holds {', '.join(map(repr, bad))}: use letters, digits, spaces and "
            f"{_PUNCTUATION.strip()} (the folder goes into --trace-output-dir)"
        )
    if re.search(r"_rank\d+$", name):
        raise ValueError(f"trace name {shown} ends like the files of another rank: leave the _rank… out")
    if len(name.encode()) > _MAX_BYTES:
        raise ValueError(f"trace name {shown} is longer than {_MAX_BYTES} bytes")
    return name


def _is_sensible(letter: str) -> bool:
    return letter.isalnum() or letter in _PUNCTUATION or unicodedata.category(letter).startswith("M")
