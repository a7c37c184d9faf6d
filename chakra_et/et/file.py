"""Chakra execution trace files (.et), with no protobuf library.

A file is a sequence of messages, each after its length as a varint32: one ``GlobalMetadata``, then a
``Node`` for each node. Source: chakra/src/third_party/utils/protolib.py in the PyPI wheel ``mlc-chakra``
1.0.0.
"""

from __future__ import annotations

from pathlib import Path

from chakra_et.errors import TraceError
from chakra_et.et.columns import ExecutionTrace
from chakra_et.et.decode import decode
from chakra_et.et.encode import encode
from chakra_et.et.wire import WireError
from chakra_et.files import atomic_file


def write(path: str | Path, trace: ExecutionTrace) -> None:
    """Write ``trace`` to ``path``: the whole file or nothing of it.

    The same columns give the same bytes. Text that isn't UTF-8 has its bad bytes replaced, as no
    protobuf reader would take it. Raises ``TraceError`` for a node of 2 GiB or more, ``OSError`` where
    the file can't be written.
    """
    with atomic_file(path) as file:
        for block in encode(trace):
            file.write(block)


def read(path: str | Path) -> ExecutionTrace:
    """Read an .et file of any writer.

    Fields may come in any order; fields that the schema doesn't have are left out and counted in
    ``unread_fields``, as are all but the last of one attribute that a node has twice. Raises
    ``TraceError`` with the byte offset and the node's number (from 0, in the file's order) where the
    bytes aren't an execution trace.
    """
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise TraceError(f"{path}: can't be read: {error.strerror or error}") from None
    if not raw:
        raise TraceError(f"{path}: the file is empty: convert the trace again")
    try:
        return decode(raw)
    except WireError as error:
        where = f"node number {error.owner}" if error.owner >= 0 else "first message"
        raise TraceError(f"{path}: byte {error.offset}, {where}: {error.what}{_guess(raw)}") from None


def _guess(raw: bytes) -> str:
    """What the file may be instead."""
    if raw[:2] == b"\x1f\x8b":
        return "; it's a gzip file, which the simulators don't open: decompress it first"
    if raw.lstrip()[:1] in (b"{", b"["):
        return "; it looks like JSON, not like an .et file: convert it first"
    return "; the file is damaged or isn't an .et file"
