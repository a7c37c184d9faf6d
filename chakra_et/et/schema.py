"""The Chakra schema as data: field numbers, and the members of ``AttributeProto.value``.

Source: chakra/schema/protobuf/et_def.proto in the PyPI wheel ``mlc-chakra`` 1.0.0.
"""

from __future__ import annotations

from typing import NamedTuple

from chakra_et.et.wire import FIXED32, FIXED64, LENGTH, VARINT

DEFAULT_VERSION = "1.0.0"
# MLCommons' converter writes these with uint64_val, and every other number with int64_val.
UNSIGNED_METADATA = frozenset({"pid", "start_ts", "finish_ts"})
# Fields of Node.
ID, NAME, TYPE, CTRL_DEPS, DATA_DEPS, START, DURATION, INPUTS, OUTPUTS, ATTR = range(1, 11)
# Fields of GlobalMetadata, AttributeProto and IOInfo.
VERSION, METADATA_ATTR = 1, 2
ATTR_NAME = 1
IO_FIELDS = VALUES, SHAPES, TYPES = 1, 2, 3


class Member(NamedTuple):
    """A member of ``AttributeProto.value``: field number, wire type, and the type of its payload."""

    number: int
    wire: int
    dtype: str


MEMBERS = {
    "double": Member(3, FIXED64, "<f8"),
    "float": Member(5, FIXED32, "<f4"),
    "int32": Member(7, VARINT, "i4"),
    "int64": Member(9, VARINT, "i8"),
    "uint32": Member(11, VARINT, "u4"),
    "uint64": Member(13, VARINT, "u8"),
    "sint32": Member(15, VARINT, "zigzag"),
    "sint64": Member(17, VARINT, "zigzag"),
    "fixed32": Member(19, FIXED32, "<u4"),
    "fixed64": Member(21, FIXED64, "<u8"),
    "sfixed32": Member(23, FIXED32, "<i4"),
    "sfixed64": Member(25, FIXED64, "<i8"),
    "bool": Member(27, VARINT, "bool"),
    "string": Member(29, LENGTH, "bytes"),
    "bytes": Member(31, LENGTH, "bytes"),
}
# The value of a list is its encoded message.
MEMBERS |= {f"{kind}_list": Member(member.number + 1, LENGTH, "bytes") for kind, member in MEMBERS.items()}
KIND_OF_KEY = {member.number << 3 | member.wire: kind for kind, member in MEMBERS.items()}
