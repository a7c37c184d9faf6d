"""Limits on reading, so that a damaged or hostile file cannot fill memory or disk."""

from __future__ import annotations

from dataclasses import dataclass

from chakra_et.errors import TraceError


@dataclass(frozen=True)
class Limits:
    """Limits for reading and repairing.

    Records (nodes, events) beyond a limit are left out and listed. A file beyond ``max_bytes``, ``max_ratio``
    or ``max_objects``, or with fewer than ``min_records`` intact records, is rejected. So is a file that only
    has records of several processes that cannot be separated, unless ``allow_mixed``.
    """

    min_records: int = 1
    max_depth: int = 200
    max_record_bytes: int = 8 << 20
    max_string_bytes: int = 4 << 20
    max_bytes: int = 64 << 30
    max_ratio: int = 400
    ratio_from_bytes: int = 64 << 20
    max_objects: int = 10_000
    max_listed: int = 10_000
    allow_mixed: bool = False

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if name != "allow_mixed" and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")


DEFAULT_LIMITS = Limits()


@dataclass(eq=False, repr=False)
class TextMeter:
    """Counts the text read from the file ``name``, and stops at the limits."""

    name: str
    limits: Limits
    given: int = 0

    def add(self, text_bytes: int, file_bytes: int) -> None:
        """Count ``text_bytes`` more. ``file_bytes``: bytes of the (compressed) file that were read in total.

        Raises ``TraceError`` beyond a limit.
        """
        self.given += text_bytes
        limits = self.limits
        if self.given > limits.max_bytes:
            raise TraceError(f"{self.name}: holds more than {limits.max_bytes} bytes of text (--max-bytes).")
        if self.given > max(limits.ratio_from_bytes, limits.max_ratio * file_bytes):
            raise TraceError(
                f"{self.name}: unpacks to more than {limits.max_ratio} times its size, which no trace does "
                "(--max-ratio)."
            )
