"""Stage 1 of the data: read SQuAD into (question, context) pairs, from the hub, a JSON file or the sample.

The answers aren't used: GPT-2 learns to continue the text and BERT to fill in masked words. Format of the
JSON: https://rajpurkar.github.io/SQuAD-explorer/ (v1.1; v2.0 adds questions without an answer).
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from utils.data.hub import DataError, datasets_cache, hub_problem, tell

SAMPLE = Path(__file__).resolve().parents[2] / "data" / "squad_sample.json"
HUB_NAMES = ("rajpurkar/squad", "squad")  # the second is what the hub called it before 2024
HELD_OUT = 10  # one paragraph in ten of a file becomes its validation set


class Example(NamedTuple):
    question: str
    context: str


class Squad(NamedTuple):
    train: list[Example]
    validation: list[Example]
    source: str  # where it came from, in words


def load_squad(dataset: str, cache_dir: str | None = None) -> Squad:
    """Read ``--dataset``: "squad" (hub cache, then hub, then the sample), "sample" or a JSON file's path.

    A file is split into train and validation by ``hold_out``. Raises ``DataError`` on a bad file or name.
    """
    if dataset == "sample":
        return _from_file(SAMPLE, "the sample in data/")
    if dataset != "squad":
        path = Path(dataset).expanduser()
        if path.is_file():
            return _from_file(path, str(path))
        raise DataError(f"--dataset {dataset}: no such file; give squad, sample or a SQuAD JSON file")

    if cached := _from_datasets_cache(datasets_cache(cache_dir)):
        return cached
    problem = hub_problem()
    if problem is None:
        try:
            return _from_hub(cache_dir)
        except Exception as error:  # whatever the hub's libraries raise, the sample is still there
            problem = f"the hub failed: {type(error).__name__}: {error}".splitlines()[0]
    sample = _from_file(SAMPLE, "the sample in data/")
    tell(
        logging.WARNING,
        f"--dataset squad: not cached in {datasets_cache(cache_dir)}, and {problem}; "
        f"using {sample.source} instead ({len(sample.train)} questions to train on, not SQuAD's 87,599)",
    )
    return sample


def read_squad_json(path: Path) -> list[Example]:
    """All questions of a SQuAD v1.1 or v2.0 file, in order. Raises ``DataError`` naming the faulty place."""
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise DataError(f"can't be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"is not JSON in UTF-8 ({error})") from error
    examples = list(_examples(content))
    if not examples:
        raise DataError("holds no question; give a SQuAD v1.1 or v2.0 JSON file")
    return examples


def hold_out(examples: list[Example]) -> tuple[list[Example], list[Example]]:
    """Split into train and validation, about 90 to 10, by context so that none is in both.

    Every tenth distinct context is held out, whatever the seed, so that runs stay comparable; of fewer
    than ten, the last.
    """
    number: dict[str, int] = {}
    for example in examples:
        number.setdefault(example.context.strip(), len(number))
    if len(number) < 2:
        raise DataError("has a single paragraph; at least two are needed, as one is held out for validation")
    chosen = min(HELD_OUT, len(number)) - 1
    split: tuple[list[Example], list[Example]] = ([], [])
    for example in examples:
        split[number[example.context.strip()] % HELD_OUT == chosen].append(example)
    return split


def _from_file(path: Path, source: str) -> Squad:
    try:
        return Squad(*hold_out(read_squad_json(path)), source)
    except DataError as error:
        raise DataError(f"--dataset {path}: {error}") from error


def _examples(content: Any) -> Iterator[Example]:
    articles = _member(content, "data", list, "the top level")
    for a, article in enumerate(articles):
        paragraphs = _member(article, "paragraphs", list, f"data[{a}]")
        for p, paragraph in enumerate(paragraphs):
            place = f"data[{a}].paragraphs[{p}]"
            context = _member(paragraph, "context", str, place)
            if not context.strip():
                raise DataError(f"{place}.context is blank")
            for q, qa in enumerate(_member(paragraph, "qas", list, place)):
                question = _member(qa, "question", str, f"{place}.qas[{q}]")
                if "answers" in qa:
                    for n, answer in enumerate(_member(qa, "answers", list, f"{place}.qas[{q}]")):
                        _member(answer, "text", str, f"{place}.qas[{q}].answers[{n}]")
                        _member(answer, "answer_start", int, f"{place}.qas[{q}].answers[{n}]")
                yield Example(question, context)


def _member(parent: Any, key: str, kind: type, place: str) -> Any:
    """``parent[key]`` if it is there and of its kind."""
    expected = f'is not SQuAD v1.1 or v2.0 JSON: {place} has no {kind.__name__} "{key}"'
    if not isinstance(parent, dict):
        raise DataError(f"{expected}, as it is a {type(parent).__name__}")
    value = parent.get(key)
    if not isinstance(value, kind):
        raise DataError(expected)
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:  # tokenizers can't take half a surrogate pair
            raise DataError(f"{place}.{key} isn't valid Unicode ({error})") from error
    return value


def _from_datasets_cache(folder: Path) -> Squad | None:
    """SQuAD as ``datasets`` left it in its cache: NAME/CONFIG/VERSION/HASH/squad-SPLIT*.arrow.

    Read with pyarrow, for importing ``datasets`` takes seconds and its load_dataset asks the hub first,
    cached or not. The layout is the same from datasets 2.0 to 5.x; a folder is renamed from
    HASH.incomplete when it is whole.
    """
    for name in HUB_NAMES:
        files = folder.joinpath(name.replace("/", "___")).glob("*/*/*/squad-train*.arrow")
        builds = {path.parent for path in files}
        for build in sorted(builds, key=lambda path: path.stat().st_mtime, reverse=True):
            if build.name.endswith(".incomplete"):
                continue
            try:
                train, validation = (_read_arrow(build, split) for split in ("train", "validation"))
            except (OSError, ValueError, KeyError) as error:  # pyarrow's errors derive from these
                tell(logging.WARNING, f"{build}: left alone, as it can't be read ({error})")
                continue
            if train and validation:
                return Squad(train, validation, f"the cache {build}")
    return None


def _read_arrow(build: Path, split: str) -> list[Example]:
    import pyarrow

    examples = []
    for path in sorted(build.glob(f"squad-{split}*.arrow")):
        with pyarrow.memory_map(str(path)) as file:
            table = pyarrow.ipc.open_stream(file).read_all().select(Example._fields)
            examples += map(Example, *(column.to_pylist() for column in table.columns))
    return examples


def _from_hub(cache_dir: str | None) -> Squad:
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    splits = datasets.load_dataset(HUB_NAMES[0], cache_dir=str(datasets_cache(cache_dir)))
    train, validation = (
        list(map(Example, *(columns[field] for field in Example._fields)))
        for columns in (splits["train"][:], splits["validation"][:])
    )
    return Squad(train, validation, f"the hub's {HUB_NAMES[0]}")
