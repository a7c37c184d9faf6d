"""Read a trace, which is mostly one JSON array of records, piece by piece.

Both kinds of trace have a few header fields, one long array (``nodes`` or ``traceEvents``) and possibly a
footer. A piece ends where a record starts. msgspec decodes it into typed structs, so memory is bounded by the
piece, not by the file. If a piece is cut at a wrong place, it does not decode (its brackets do not balance),
and the cut is moved. Limits keep a damaged or hostile file from filling memory or disk.
"""

from __future__ import annotations

import gzip
import io
import itertools
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from chakra_et.errors import TraceError, UnreadableTrace
from chakra_et.files import is_remote, open_regular

# Of 2**18 to 2**24, the size that takes least time: the records of a piece stay in the cache.
PIECE_BYTES = 1 << 20
# The array starts within this many bytes.
HEAD_BYTES = 16 << 20
MAX_CUTS = 64
# Stop after this much text without the end of a record, so that a damaged file does not fill the memory.
MAX_RECORD_BYTES = 64 << 20
MAX_BYTES = 64 << 30
"""Of the text of a trace."""
# No trace is packed as densely as this, from this size on.
MAX_RATIO, RATIO_FROM_BYTES = 400, 64 << 20
RECORD_END = re.compile(rb"\}\s*,\s*(?=\{)")
RAW_RECORDS = msgspec.json.Decoder(list[msgspec.Raw])


@dataclass(eq=False, repr=False)
class TextMeter:
    """Counts the text read from the file ``name``, and stops at the limits."""

    name: str
    max_bytes: int
    given: int = 0

    def add(self, text_bytes: int, file_bytes: int) -> None:
        """Count ``text_bytes`` more. ``file_bytes``: bytes of the (compressed) file that were read in total.

        Raises ``TraceError`` beyond a limit.
        """
        self.given += text_bytes
        if self.given > self.max_bytes:
            raise TraceError(f"{self.name}: holds more than {self.max_bytes} bytes of text (--max-bytes).")
        if self.given > max(RATIO_FROM_BYTES, MAX_RATIO * file_bytes):
            raise TraceError(f"{self.name}: unpacks to over {MAX_RATIO} times its size, which no trace does.")


class Taker:
    """Collects the records of a trace."""

    def take(self, records: list[Any]) -> None:
        """Collect records, in the order of the file."""

    def leave_out(self, record: bytes) -> None:
        """Count a record that is valid JSON but has a field of the wrong type."""


def open_trace(path: Path) -> gzip.GzipFile | io.BufferedReader:
    """Open a plain or gzip-compressed trace for reading, recognised by content, not by name."""
    with open_regular(path) as file:
        magic = file.read(2)
    if magic != b"\x1f\x8b":
        return open_regular(path)
    return gzip.open(open_regular(path) if is_remote(path) else path, "rb")


def read_records(
    path: Path,
    array_key: str,
    document_type: Callable[[bytes], type],
    taker: Taker,
    max_bytes: int = MAX_BYTES,
    piece_bytes: int = PIECE_BYTES,
) -> Any:
    """Decode the array ``array_key`` of the JSON object in ``path``.

    ``document_type`` selects the struct of the document by the first bytes of the file; its field
    ``array_key`` is a list of the struct of one record. Returns the document with an empty array, that is the
    header and footer fields.

    Raises ``UnreadableTrace`` if the file is not one JSON object with that array, and ``TraceError`` if it
    cannot be opened or is too long.
    """
    try:
        with open_trace(path) as file:
            meter, size = TextMeter(str(path), max_bytes), path.stat().st_size
            return _Reader(file, path, array_key, document_type, taker, meter, size).run(piece_bytes)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnreadableTrace(f"{path}: is not a readable trace ({error}).", path) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UnreadableTrace(f"{path}: is a damaged gzip file ({error}).", path) from None
    except OSError as error:
        raise TraceError(f"{path}: can't be read ({error.strerror or error}).") from None


@dataclass(eq=False, repr=False)
class _Reader:
    """Reads one trace: its text within the limits, of which it passes the records on."""

    file: gzip.GzipFile | io.BufferedReader
    path: Path
    array_key: str
    document_type: Callable[[bytes], type]
    taker: Taker
    meter: TextMeter
    size: int  # of the file
    ascii: bool = True  # all text so far

    def read(self, size: int) -> bytes:
        data = self.file.read(size)
        self.meter.add(len(data), self.size)
        self.ascii = self.ascii and data.isascii()
        return data

    def run(self, piece_bytes: int) -> Any:
        """Pass on all records; returns the rest of the document."""
        path, key = self.path, self.array_key
        pattern = re.compile(rb'"%s"\s*:\s*\[\s*' % key.encode())
        buffer = self.read(piece_bytes)
        while (opening := pattern.search(buffer)) is None and len(buffer) < HEAD_BYTES:
            more = self.read(len(buffer))
            if not more:
                break
            buffer += more
        if opening is None:
            raise UnreadableTrace(f'{path}: has no "{key}" array, so it is no trace of that kind.', path)
        head, rest = buffer[: opening.end()], buffer[opening.end() :]
        document = self.document_type(buffer[:65536])
        array_type = get_type_hints(document)[key]
        self.array = msgspec.json.Decoder(array_type)
        self.record = msgspec.json.Decoder(array_type.__args__[0])
        start = re.match(rb'\{\s*"[^"\\]*"\s*:', rest)
        while start is not None:
            # Twice as much each time if no record ends, as all of it is decoded again.
            more = self.read(max(piece_bytes, len(rest)))
            if not more:
                break
            # The piece is decoded in place, as a JSON list in its own buffer.
            piece = bytearray().join((b"[", rest, more))
            cut = self.take_piece(piece, start.group())
            if not cut and len(piece) > MAX_RECORD_BYTES:
                raise UnreadableTrace(f"{path}: is damaged: no record ends within {len(piece)} bytes.", path)
            rest = bytes(memoryview(piece)[cut or 1 :])
        text = head + rest + b"".join(iter(lambda: self.read(PIECE_BYTES), b""))
        self.check_text(text)
        last: Any
        try:
            last = msgspec.json.Decoder(document).decode(text)
        except msgspec.ValidationError:
            fields = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
            self.take_one_by_one(fields.get(key, b"null"))
            fields[key] = msgspec.Raw(b"[]")
            return msgspec.json.decode(msgspec.json.encode(fields), type=document)
        self.taker.take(getattr(last, key))
        setattr(last, key, [])
        return last

    def take_piece(self, piece: bytearray, record_start: bytes) -> int:
        """Pass on the complete records of ``piece``; returns the offset of the rest, 0 if there are none."""
        for cut, comma in _cuts(piece, record_start):
            piece[comma] = ord("]")
            text = memoryview(piece)[: comma + 1]
            try:
                try:
                    self.taker.take(self.array.decode(text))
                except msgspec.ValidationError:
                    self.take_one_by_one(text)
            except msgspec.DecodeError:
                piece[comma] = ord(",")
                continue
            self.check_text(text)
            return cut
        return 0

    def take_one_by_one(self, text: Any) -> None:
        """Slower, but a field of the wrong type affects only its own record."""
        records, bad = [], []
        for raw in RAW_RECORDS.decode(text):
            try:
                records.append(self.record.decode(raw))
            except msgspec.ValidationError:
                bad.append(bytes(raw))
        for record in bad:
            self.taker.leave_out(record)
        self.taker.take(records)

    def check_text(self, text: bytes | memoryview) -> None:
        """Check the encoding, as the decoder does not check raw values such as those of tensors."""
        if not self.ascii:
            str(text, "utf-8")


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
