"""Read and write Chakra execution trace files (.et) without a protobuf library.

    trace = read("outputs/gpt2_2gpu_quick_trace.0.et")
    write("copy.0.et", trace)

A file is a sequence of messages, each prefixed by its length as a varint32: one ``GlobalMetadata``, then one
``Node`` per node. Source: chakra/src/third_party/utils/protolib.py in the PyPI wheel ``mlc-chakra``
1.0.0.
"""

from __future__ import annotations

from pathlib import Path

from chakra_et.errors import TraceError
from chakra_et.et.columns import ExecutionTrace
from chakra_et.et.wire import WireError, read_varint
from chakra_et.files import atomic_file, open_regular, read_bytes
from chakra_et.names import SKELETON

MOST_ET_BYTES = 1 << 36


def write(path: str | Path, trace: ExecutionTrace) -> None:
    """Write ``trace`` to ``path`` atomically.

    The same columns always give the same bytes. Invalid UTF-8 is replaced, as protobuf readers would reject
    it. Raises ``TraceError`` for a node of 2 GiB or more and ``OSError`` if the file cannot be written.
    """
    from chakra_et.et.encode import encode  # what only reads doesn't load it

    with atomic_file(path) as file:
        for block in encode(trace):
            file.write(block)


def read(path: str | Path) -> ExecutionTrace:
    """Read an .et file from any writer.

    Fields may come in any order. Fields that are not in the schema, and all but the last of duplicate
    attributes of a node, are ignored. Raises ``TraceError`` with the byte
    offset and the index of the node in the file (from 0) if the bytes are not an execution trace. Reads the
    skeleton of a rank, too.
    """
    if str(path).endswith(SKELETON):
        from chakra_et.et.skeleton import read_skeleton  # most runs have none

        return read_skeleton(path)
    try:
        raw = read_bytes(path, MOST_ET_BYTES)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from None
    from chakra_et.et.decode import decode  # a conversion only writes

    if not raw:
        raise TraceError(f"{path}: the file is empty: convert the trace again")
    try:
        return decode(raw)
    except WireError as error:
        where = f"node number {error.owner}" if error.owner >= 0 else "first message"
        raise TraceError(f"{path}: byte {error.offset}, {where}: {error.what}{_guess(raw)}") from None


def read_metadata(path: Path) -> dict[str, int | str | bool | float]:
    """The metadata of an .et file, without its nodes; {} for a file that ``read`` refuses."""
    from chakra_et.et.decode import decode

    try:
        with open_regular(path) as file:
            head = file.read(10)
            size, start = read_varint(head, 0, len(head))
            return decode(head + file.read(max(start + size - len(head), 0))).metadata if size else {}
    except (OSError, WireError, MemoryError, OverflowError):
        return {}


def _guess(raw: bytes) -> str:
    """A hint at what else the file may be."""
    if raw[:2] == b"\x1f\x8b":
        return "; it is a gzip file: decompress it or, if it is a trace, convert it (chakra-et convert)"
    if raw.lstrip()[:1] in (b"{", b"["):
        return "; it looks like JSON: convert it to an .et file first (chakra-et convert)"
    return "; the file is damaged or not an .et file"
