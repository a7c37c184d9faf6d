"""What a page holds, read by other means than its scripts: see ``report.page`` for the layout."""

from __future__ import annotations

import base64
import gzip
import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np

from chakra_et.report.page import TYPES


def page_data(page: Path | str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The content and the columns of a page, from its file or text."""
    text = page.read_text(encoding="utf-8") if isinstance(page, Path) else page
    found = re.search(r'id="data">([A-Za-z0-9+/=]+)</script>', text)
    assert found is not None
    return unpack(base64.b64decode(found[1]))


def unpack(block: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The content and the columns of a block."""
    raw = gzip.decompress(block)
    (length,) = struct.unpack_from("<I", raw)
    content, at, columns = json.loads(raw[4 : 4 + length]), 4 + length, {}
    for name, kind, rows, encoding in content["columns"]:
        size = np.dtype(TYPES[kind]).itemsize
        column = np.frombuffer(raw, np.uint8, rows * size, at).reshape(size, rows)
        values = column.T.copy().view(TYPES[kind]).reshape(-1)
        columns[name] = np.cumsum(values, dtype=np.uint32) if encoding == "delta" else values
        at += rows * size
    return content, columns
