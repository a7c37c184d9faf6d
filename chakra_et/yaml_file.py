"""YAML files of users, read within limits: PyYAML recurses at brackets, and repeats what an alias names."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from chakra_et.errors import TraceError
from chakra_et.files import read_bytes

MOST_BYTES, MOST_DEPTH, MOST_VALUES = 4 << 20, 64, 100_000


def read_yaml(path: Path) -> Any:
    """The document in a YAML file; its keys are texts, each once.

    Raises ``TraceError``, also for a file that is too large, too deep, or has too many values with those that
    its aliases repeat, and ``ImportError`` without PyYAML.
    """
    import yaml

    try:
        text = read_bytes(path, MOST_BYTES).decode("utf-8-sig")
        _check(text)
        return yaml.load(text, _loader())
    except OSError as error:
        raise TraceError(f"{path}: can't be read: {error.strerror or error}.") from None
    except UnicodeDecodeError:
        raise TraceError(f"{path}: not a text file: give YAML.") from None
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or "unreadable"
        where = f", line {mark.line + 1}" if mark else ""
        ours = any(words in problem for words in ("there twice", "give a name", "too"))
        raise TraceError(f"{path}{where}: {'' if ours else 'not YAML: '}{problem[:200]}.") from None
    except ValueError as error:  # a date that there is not, a number of thousands of digits
        raise TraceError(f"{path}: not YAML that can be read: {error}.") from None


@functools.cache
def _loader() -> Any:
    import yaml

    def mapping(loader: Any, node: Any, deep: bool = False) -> Any:
        seen: set[str] = set()
        for key, _ in node.value:
            problem = ""
            if not isinstance(key.value, str):
                problem = "a key is a list or a mapping: give a name"
            elif key.value in seen and key.value != "<<":
                problem = f"the key {key.value!r} is there twice"
            if problem:
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value)
        loader.flatten_mapping(node)
        return loader.construct_mapping(node, deep=True)

    made: Any = type("UniqueKeys", (getattr(yaml, "CSafeLoader", yaml.SafeLoader),), {})
    made.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    return made


def _check(text: str) -> None:
    """Raises ``YAMLError`` where the document is beyond a limit. Parsing to events doesn't recurse."""
    import yaml

    known: dict[str, tuple[int, int]] = {}  # anchor → values, depth
    inside: list[tuple[str | None, int, int]] = [(None, 0, 0)]
    for event in yaml.parse(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        anchor, values, depth = getattr(event, "anchor", None), 0, 0
        if isinstance(event, yaml.CollectionStartEvent):
            inside.append((anchor, 1, 0))
        elif isinstance(event, yaml.AliasEvent):
            # One inside of what it names has no end.
            values, depth = known.get(str(anchor), (MOST_VALUES + 1, 0))
        elif isinstance(event, yaml.ScalarEvent):
            values, depth = 1, 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, values, depth = inside.pop()
        if anchor is not None and values:
            known[anchor] = values, depth
        above, count, deepest = inside[-1]
        inside[-1] = above, count + values, max(deepest, depth + 1)
        if inside[-1][1] > MOST_VALUES or len(inside) + inside[-1][2] > MOST_DEPTH:
            problem = f"too deep or too large: at most {MOST_DEPTH} levels and {MOST_VALUES:,} values"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
