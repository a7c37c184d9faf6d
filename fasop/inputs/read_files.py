"""Reading the files that users write, with one sentence for each way they can be wrong."""

from __future__ import annotations

import functools
import reprlib
import types
import typing
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import msgspec

from chakra_et import files, yaml_file
from fasop.errors import PlanError, nearest

DATA = Path(__file__).parents[1] / "data"
Kind = TypeVar("Kind")
_short = reprlib.Repr()
_short.maxstring = _short.maxother = 60
_short.maxlong = 40


def read_yaml(path: Path, top: str) -> dict[str, Any]:
    """The mapping under the key ``top`` of a YAML file. Raises ``PlanError``."""
    # Presets are JSON, as loading PyYAML takes longer than a small search has.
    document = files.read_json(path) if path.parent == DATA else yaml_file.read_yaml(path)
    if not isinstance(document, dict) or not isinstance(document.get(top), dict) or not document[top]:
        raise PlanError(f"{path}: no entries under the key '{top}'.")
    return {str(name): entry for name, entry in document[top].items()}


def read_json(path: str | Path, kind: type[Kind], what: str, remedy: str) -> Kind:
    """A JSON file as a value of a type. what: the file is meant to be, remedy: how such files are made.

    Raises ``PlanError``.
    """
    try:
        data = files.read_bytes(path)
    except OSError as error:
        raise PlanError(f"{path}: can't be read: {error.strerror or error}.") from None
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, PlanError):  # what a dataclass of the file says of its values
            raise PlanError(f"{path}: {error.__cause__}") from None
        problem, _, place = str(error).partition(" - at `$")
        if place := place.strip(".`"):
            raise PlanError(f"{path}: {place}: {problem[0].lower()}{problem[1:]}.") from None
        raise PlanError(f"{path}: not {what} ({problem}): {remedy}.") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise PlanError(f"{path}: not {what} ({error}): {remedy}.") from None


def shown(value: Any) -> str:
    """A value in a sentence, cut where it is long."""
    try:
        return _short.repr(value)
    except ValueError:
        return "a number of thousands of digits"


def read_mapping(where: str, entry: Any, known: Collection[str]) -> dict[str, Any]:
    """``entry`` as a dict with known keys only. Raises ``PlanError``."""
    if not isinstance(entry, dict):
        raise PlanError(f"{where}: expected settings as 'name: value', got {shown(entry)}.")
    for key in entry:
        if key not in known:
            raise PlanError(f"{where}: unknown setting {shown(key)}: {nearest(str(key), known)}")
    return dict(entry)


def read_settings(
    where: str, entry: Any, kinds: Mapping[str, Any], needed: Collection[str] = ()
) -> dict[str, Any]:
    """``entry`` with every value checked by the kind of its key. Raises ``PlanError``."""
    values = read_mapping(where, entry, kinds)
    if missing := [key for key in needed if key not in values]:
        raise PlanError(f"{where}: lacks {', '.join(missing)}.")
    return {key: checked(f"{where}: {key}", value, kinds[key]) for key, value in values.items()}


@functools.cache
def kinds_of(holder: type) -> dict[str, Any]:
    """The kind of each field of a dataclass."""
    return typing.get_type_hints(holder, include_extras=True)


def checked(where: str, value: Any, kind: Any) -> Any:
    """A value that a file gives for a kind: a type, or one of ``kinds``. Raises ``PlanError``.

    Text is accepted for a number with a fraction, as YAML 1.1 reads 40e9 as text. A number is accepted for a
    name, as of a node called 7.
    """
    base = _parts(kind)[0]
    if base is str or base is tuple:
        value = _named(value)
    elif base is int and hasattr(value, "__index__") and not isinstance(value, bool):
        value = int(value)  # NumPy's too
    try:
        return msgspec.convert(value, kind, strict=base is not float)
    except (msgspec.ValidationError, OverflowError):
        raise PlanError(f"{where}: {shown(value)}: {_expected(value, kind)}.") from None


def _named(value: Any) -> Any:
    if isinstance(value, list):
        return [_named(each) for each in value]
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _parts(kind: Any) -> tuple[Any, msgspec.Meta]:
    """The type and the bounds of a kind, without ``| None``."""
    if get_origin(kind) in (typing.Union, types.UnionType):
        kind = next(part for part in get_args(kind) if part is not type(None))
    if get_origin(kind) is Annotated:
        return get_args(kind)[0], get_args(kind)[1]
    return get_origin(kind) or kind, msgspec.Meta()


def _expected(value: Any, kind: Any) -> str:
    """What to give instead; "" for a kind that a word or two don't describe."""
    base, meta = _parts(kind)
    if base is float:
        example = f" ({meta.examples[0]})" if meta.examples else ""
        return f"expected {meta.description} between {meta.ge:g} and {meta.le:g}{example}"
    if base is int:
        return "give a whole number" + ("" if meta.ge is None else f" from {meta.ge} to {meta.le}")
    if base is Literal:
        (names,) = (part for part in (kind, *get_args(kind)) if get_origin(part) is Literal)
        return nearest(str(value), get_args(names)).rstrip(".")
    if base is tuple and get_origin(get_args(kind)[0]) is Literal:
        return f"give a list of {', '.join(get_args(get_args(kind)[0]))}"
    if base is tuple and _parts(get_args(kind)[0])[0] is str:
        return "give two names" if get_args(kind)[-1] is str else "give a list of names"
    words = {bool: "true or false", str: "a name", list: "a list", tuple: "a list"}
    return f"give {words[base]}" if base in words else ""
