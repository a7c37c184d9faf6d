"""Parse bandwidths, times and arithmetic rates. A figure without a unit is rejected, never guessed."""

from __future__ import annotations

import math
import re

from chakra_et.errors import TraceError

GIB = 1 << 30
_PREFIX = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_PREFIX |= {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_NANOSECONDS = {"ns": 1.0, "us": 1e3, "µs": 1e3, "μs": 1e3, "ms": 1e6, "s": 1e9}
_NUMBER = r"([-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?)\s*"
# As vendors write them: bits have a small b or are spelled out, bytes have a capital B.
_BITS = re.compile(_NUMBER + r"([kKMGTP]?)(?:(?i:bits?)/s|b/s|bps)")
_BYTES = re.compile(_NUMBER + r"([KMGT]i|[kKMGTP]?)B(?:/s|ps)")
_TIME = re.compile(_NUMBER + r"(ns|us|µs|μs|ms|s)")
_RATE = re.compile(_NUMBER + r"([kKMGTP]?)FLOP(?:/s|S)")


def parse_bandwidth(text: str) -> float:
    """``400 Gbit/s``, ``50 GB/s``, ``46.6 GiB/s`` as bytes per second.

    Gbit/s, Gb/s and Gbps are decimal bits, GB/s and GBps decimal bytes, GiB/s binary bytes. Raises
    ``TraceError`` if the unit is missing or the figure is not above 0.
    """
    bits = _BITS.fullmatch(text.strip())
    found = bits or _matched(_BYTES, "bandwidth", text, "400 Gbit/s or 50 GB/s")
    return _positive("bandwidth", text, float(found[1]) * _PREFIX[found[2]] / (8 if bits else 1))


def parse_latency(text: str) -> float:
    """``5 us`` as ns. Raises ``TraceError`` if the unit is missing or the figure is below 0."""
    found = _matched(_TIME, "latency", text, "5 us or 900 ns")
    value = float(found[1]) * _NANOSECONDS[found[2]]
    if not 0 <= value < math.inf:
        raise TraceError(f"latency {text.strip()!r} must be 0 or more")
    return value


def parse_rate(text: str) -> float:
    """``989 TFLOP/s`` as operations per second. Raises ``TraceError``."""
    found = _matched(_RATE, "arithmetic rate", text, "989 TFLOP/s")
    return _positive("arithmetic rate", text, float(found[1]) * _PREFIX[found[2]])


def _positive(what: str, text: str, value: float) -> float:
    if not 0 < value < math.inf:
        raise TraceError(f"{what} {text.strip()!r} must be above 0")
    return value


def _matched(form: re.Pattern[str], what: str, text: str, example: str) -> re.Match[str]:
    found = form.fullmatch(text.strip())
    if found:
        return found
    why = "has no unit" if re.fullmatch(_NUMBER, text.strip()) else "is not valid"
    raise TraceError(f"{what} {text.strip()!r} {why}: write it as in {example}")
