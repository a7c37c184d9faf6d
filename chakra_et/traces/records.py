"""Read a trace, which is mostly one JSON array of records, piece by piece.

Both kinds of trace have a few header fields, one long array (``nodes`` or ``traceEvents``) and possibly a
footer. A piece ends where a record starts. msgspec decodes it into typed structs, so memory is bounded by the
piece, not by the file. If a piece is cut at a wrong place, it does not decode (its brackets do not balance),
and the cut is moved.
"""

from __future__ import annotations

import gzip
import io
import itertools
import os
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, get_type_hints

import msgspec

from chakra_et.errors import TraceError, UnreadableTrace
from chakra_et.files import open_regular
from chakra_et.traces.limits import DEFAULT_LIMITS, Limits, TextMeter

# Of 2**18 to 2**24, the size that takes least time: the records of a piece stay in the cache.
PIECE_BYTES = 1 << 20
# The array starts within this many bytes.
HEAD_BYTES = 16 << 20
MAX_CUTS = 64
# Stop after this much text without the end of a record, so that a damaged file does not fill the memory.
MAX_RECORD_BYTES = 64 << 20
RECORD_END = re.compile(rb"\}\s*,\s*(?=\{)")
RAW_RECORDS = msgspec.json.Decoder(list[msgspec.Raw])


class Taker(Protocol):
    """Collects the records of a trace."""

    def take(self, records: list[Any]) -> None:
        """Collect records, in the order of the file."""

    def leave_out(self, record: bytes) -> None:
        """Count a record that is valid JSON but has a field of the wrong type."""


def open_trace(path: Path) -> gzip.GzipFile | io.BufferedReader:
    """Open a plain or gzip-compressed trace for reading, recognised by content, not by name."""
    with open_regular(path) as file:
        magic = file.read(2)
    return gzip.open(path, "rb") if magic == b"\x1f\x8b" else open(path, "rb")


def read_records(
    path: Path,
    array_key: str,
    document_type: Callable[[bytes], type],
    taker: Taker,
    limits: Limits = DEFAULT_LIMITS,
    piece_bytes: int = PIECE_BYTES,
) -> Any:
    """Decode the array ``array_key`` of the JSON object in ``path``.

    ``document_type`` selects the struct of the document by the first bytes of the file; its field
    ``array_key`` is a list of the struct of one record. Returns the document with an empty array, that is the
    header and footer fields.

    Raises ``UnreadableTrace`` if the file is not one JSON object with that array, and ``TraceError`` if it
    cannot be opened or exceeds ``limits``.
    """
    try:
        with open_trace(path) as file:
            limited = _Limited(file, path, limits)
            return _read(limited, path, array_key, document_type, taker, piece_bytes)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnreadableTrace(f"{path}: is not a readable trace ({error}).", path) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UnreadableTrace(f"{path}: is a damaged gzip file ({error}).", path) from None
    except OSError as error:
        raise TraceError(f"{path}: can't be read ({error.strerror or error}).") from None


class _Limited:
    """The text of a trace, read within the limits. ``ascii``: whether all text so far is ASCII."""

    def __init__(self, file: gzip.GzipFile | io.BufferedReader, path: Path, limits: Limits) -> None:
        self._file, self._meter, self._size = file, TextMeter(str(path), limits), os.path.getsize(path)
        self.ascii = True

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self._meter.add(len(data), self._size)
        self.ascii = self.ascii and data.isascii()
        return data

    def rest(self) -> bytes:
        return b"".join(iter(lambda: self.read(PIECE_BYTES), b""))


def _read(
    file: _Limited,
    path: Path,
    array_key: str,
    document_type: Callable[[bytes], type],
    taker: Taker,
    piece_bytes: int,
) -> Any:
    pattern = re.compile(rb'"%s"\s*:\s*\[\s*' % array_key.encode())
    buffer = file.read(piece_bytes)
    while (opening := pattern.search(buffer)) is None and len(buffer) < HEAD_BYTES:
        more = file.read(len(buffer))
        if not more:
            break
        buffer += more
    if opening is None:
        raise UnreadableTrace(f'{path}: has no "{array_key}" array, so it is not such a trace.', path)
    head, rest = buffer[: opening.end()], buffer[opening.end() :]
    document = document_type(buffer[:65536])
    decoder = _Decoder(get_type_hints(document)[array_key], taker, file)
    start = re.match(rb'\{\s*"[^"\\]*"\s*:', rest)
    while start is not None:
        # Twice as much each time if no record ends, as all of it is decoded again.
        more = file.read(max(piece_bytes, len(rest)))
        if not more:
            break
        # The piece is decoded in place, as a JSON list in its own buffer.
        piece = bytearray().join((b"[", rest, more))
        cut = _decode_piece(piece, start.group(), decoder)
        if not cut and len(piece) > MAX_RECORD_BYTES:
            raise UnreadableTrace(f"{path}: is damaged, or one record has {len(piece)} bytes.", path)
        rest = bytes(memoryview(piece)[cut or 1 :])
    return _last(head + rest + file.rest(), document, array_key, decoder)


def _last(text: bytes, document: type, array_key: str, decoder: _Decoder) -> Any:
    """Decode the header, the remaining records and the footer."""
    decoder.check_text(text)
    last: Any
    try:
        last = msgspec.json.Decoder(document).decode(text)
    except msgspec.ValidationError:
        fields = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        decoder.one_by_one(fields.get(array_key, b"null"))
        fields[array_key] = msgspec.Raw(b"[]")
        return msgspec.json.decode(msgspec.json.encode(fields), type=document)
    decoder.taker.take(getattr(last, array_key))
    setattr(last, array_key, [])
    return last


class _Decoder:
    """Decodes a JSON array of records and passes them on."""

    def __init__(self, array_type: Any, taker: Taker, file: _Limited) -> None:
        self.taker, self._file = taker, file
        self._all = msgspec.json.Decoder(array_type)
        (record_type,) = array_type.__args__
        self._one = msgspec.json.Decoder(record_type)

    def decode(self, text: memoryview) -> None:
        try:
            records = self._all.decode(text)
        except msgspec.ValidationError:
            self.one_by_one(text)
        else:
            self.taker.take(records)

    def check_text(self, text: bytes | memoryview) -> None:
        """Check the encoding, as the decoder does not check raw values such as those of tensors."""
        if not self._file.ascii:
            str(text, "utf-8")

    def one_by_one(self, text: Any) -> None:
        """Slower, but a field of the wrong type affects only its own record."""
        records, bad = [], []
        for raw in RAW_RECORDS.decode(text):
            try:
                records.append(self._one.decode(raw))
            except msgspec.ValidationError:
                bad.append(bytes(raw))
        for record in bad:
            self.taker.leave_out(record)
        self.taker.take(records)


def _decode_piece(piece: bytearray, record_start: bytes, decoder: _Decoder) -> int:
    """Decode the complete records of ``piece``; returns the offset of the rest, 0 if there are none."""
    for cut, comma in _cuts(piece, record_start):
        piece[comma] = ord("]")
        try:
            decoder.decode(memoryview(piece)[: comma + 1])
        except msgspec.DecodeError:
            piece[comma] = ord(",")
            continue
        decoder.check_text(memoryview(piece)[: comma + 1])
        return cut
    return 0


def _cuts(piece: bytearray, record_start: bytes) -> Iterator[tuple[int, int]]:
    """Places near the end of ``piece`` where a record may start, last first, with the comma before each."""
    cut = len(piece)
    for _ in range(MAX_CUTS):
        cut = piece.rfind(record_start, 2, cut)
        if cut < 0:
            break
        begin = max(0, cut - 64)
        text = piece[begin:cut].rstrip()
        if text.endswith(b","):
            yield cut, begin + len(text) - 1
    # Records that start differently from the first one.
    begin = max(0, len(piece) - (1 << 20))
    ends = list(RECORD_END.finditer(piece[begin:]))[::-1]
    for end in itertools.islice(ends, MAX_CUTS):
        yield begin + end.end(), begin + end.start() + end.group().index(b",")
