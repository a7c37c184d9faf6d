"""Parse bandwidths, times and arithmetic rates. A figure without a unit is rejected, never guessed."""

from __future__ import annotations

import math
import re

from chakra_et.errors import TraceError

GIB = 1 << 30
_PREFIX = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_NUMBER = r"(?P<number>[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?)"
# As vendors write them: bits have a small b or are spelled out, bytes have a capital B.
BANDWIDTH = re.compile(
    _NUMBER + r"\s*(?P<prefix>[kKMGTP]?)(?:(?P<bits>(?i:bits?)/s|b/s|bps)|(?P<binary>i?)B(?:/s|ps))"
)
TIME = re.compile(_NUMBER + r"\s*(?P<unit>ns|us|µs|μs|ms|s)")
RATE = re.compile(_NUMBER + r"\s*(?P<prefix>[kKMGTP]?)FLOP(?:/s|S)")
_BARE = re.compile(_NUMBER)
_NANOSECONDS = {"ns": 1.0, "us": 1e3, "µs": 1e3, "μs": 1e3, "ms": 1e6, "s": 1e9}


def parse_bandwidth(text: str) -> float:
    """``400 Gbit/s``, ``50 GB/s``, ``46.6 GiB/s`` as bytes per second.

    Gbit/s, Gb/s and Gbps are decimal bits, GB/s and GBps decimal bytes, GiB/s binary bytes. Raises
    ``TraceError`` if the unit is missing or the figure is not above 0.
    """
    found = BANDWIDTH.fullmatch(text.strip())
    if not found:
        raise TraceError(_refusal("bandwidth", text, "400 Gbit/s or 50 GB/s"))
    prefix = found["prefix"]
    if found["binary"]:
        if f"{prefix}i" not in _BINARY:
            raise TraceError(_refusal("bandwidth", text, "400 Gbit/s or 50 GB/s"))
        scale = _BINARY[f"{prefix}i"]
    else:
        scale = _PREFIX[prefix]
    return _positive("bandwidth", text, float(found["number"]) * scale / (8 if found["bits"] else 1))


def parse_latency(text: str) -> float:
    """``5 us`` as ns. Raises ``TraceError`` if the unit is missing or the figure is below 0."""
    found = TIME.fullmatch(text.strip())
    if not found:
        raise TraceError(_refusal("latency", text, "5 us or 900 ns"))
    value = float(found["number"]) * _NANOSECONDS[found["unit"]]
    if not 0 <= value < math.inf:
        raise TraceError(f"latency {text.strip()!r} must be 0 or more")
    return value


def parse_rate(text: str) -> float:
    """``989 TFLOP/s`` as operations per second. Raises ``TraceError``."""
    found = RATE.fullmatch(text.strip())
    if not found:
        raise TraceError(_refusal("arithmetic rate", text, "989 TFLOP/s"))
    return _positive("arithmetic rate", text, float(found["number"]) * _PREFIX[found["prefix"]])


def _positive(what: str, text: str, value: float) -> float:
    if not 0 < value < math.inf:
        raise TraceError(f"{what} {text.strip()!r} must be above 0")
    return value


def _refusal(what: str, text: str, example: str) -> str:
    if _BARE.fullmatch(text.strip()):
        return f"{what} {text.strip()!r} has no unit: write it as in {example}"
    return f"{what} {text.strip()!r} is not valid: write it as in {example}"
