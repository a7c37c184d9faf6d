"""Stage 1 of the data: read SQuAD into (question, context) pairs, from the hub, a JSON file or the sample.

The answers aren't used: GPT-2 learns to continue the text, BERT to fill in masked words. Format of the JSON:
https://rajpurkar.github.io/SQuAD-explorer/ (v1.1; v2.0 adds questions without an answer).
"""

from __future__ import annotations

import codecs
import logging
import sys
from pathlib import Path
from typing import NamedTuple

import msgspec

from utils.data.config import DataError, datasets_cache, hub_problem, log_once

SAMPLE = Path(__file__).resolve().parents[2] / "data" / "squad_sample.json"
HUB_NAMES = ("rajpurkar/squad", "squad")  # the second is the hub's name for it before 2024
HELD_OUT = 10  # one paragraph in ten of a file becomes its validation set


class Example(NamedTuple):
    """One question and the paragraph that it is about."""

    question: str
    context: str


class Squad(NamedTuple):
    """Both splits, and where they came from in words."""

    train: list[Example]
    validation: list[Example]
    source: str


def load_squad(dataset: str, required: bool = False) -> Squad:
    """Read ``--dataset``: "squad" (cache, then hub, then the sample), "sample" or the path of a JSON file.

    A file is split into train and validation by ``hold_out``. Raises ``DataError`` for a bad file or name,
    and if "squad" is ``required`` but neither cached nor on the hub.
    """
    if dataset == "sample":
        return _from_file(SAMPLE, "the sample in data/")
    if dataset != "squad":
        path = Path(dataset).expanduser()
        if path.is_file():
            return _from_file(path, str(path))
        raise DataError(f"--dataset {dataset}: no such file; give squad, sample or a SQuAD JSON file")

    folder = datasets_cache()
    cached = [name for name in HUB_NAMES if (folder / name.replace("/", "___")).is_dir()]
    for name in cached:
        try:
            return _load(name, folder, f"the cache {folder}", offline=True)
        except Exception as error:  # damage shows as an error of pyarrow, json or datasets
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            log_once(logging.WARNING, f"{folder}: the cached {name} can't be read ({reason})")
    problem = hub_problem()
    if problem is None:
        try:
            return _load(HUB_NAMES[0], folder, f"the hub's {HUB_NAMES[0]}", offline=False)
        except Exception as error:  # whatever the hub's libraries raise, the sample is still there
            problem = f"the hub failed: {type(error).__name__}: {error}".splitlines()[0]
    missing = f"--dataset squad: not cached in {folder}, and {problem}"
    if required:
        raise DataError(f"{missing}; give a SQuAD JSON file, or train on the sample with --dataset sample")
    sample = _from_file(SAMPLE, "the sample in data/")
    size = f"{len(sample.train)} training questions, not SQuAD's 87,599"
    log_once(logging.WARNING, f"{missing}; using {sample.source} instead ({size})")
    return sample


class _Question(msgspec.Struct):
    question: str


class _Paragraph(msgspec.Struct):
    context: str
    qas: list[_Question]


class _Article(msgspec.Struct):
    paragraphs: list[_Paragraph]


class _File(msgspec.Struct):
    data: list[_Article]


def read_squad_json(path: Path) -> list[Example]:
    """All questions of a SQuAD v1.1 or v2.0 file, in order. Raises ``DataError`` naming the faulty place."""
    try:
        content = msgspec.json.decode(path.read_bytes().removeprefix(codecs.BOM_UTF8), type=_File)
    except OSError as error:
        raise DataError(f"can't be read ({error.strerror})") from error
    except msgspec.ValidationError as error:
        raise DataError(f"is not SQuAD v1.1 or v2.0 JSON: {error}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"is not JSON in UTF-8 ({error})") from error
    paragraphs = [paragraph for article in content.data for paragraph in article.paragraphs]
    if any(not paragraph.context.strip() for paragraph in paragraphs):
        raise DataError("has a paragraph whose context is blank")
    examples = [Example(each.question, of.context) for of in paragraphs for each in of.qas]
    if not examples:
        raise DataError("has no question; give a SQuAD v1.1 or v2.0 JSON file")
    return examples


def hold_out(examples: list[Example]) -> tuple[list[Example], list[Example]]:
    """Split into train and validation, about 90 to 10, by context, so that the two share none.

    Every tenth distinct context is held out, whatever the seed, so that runs stay comparable; with fewer
    than ten contexts, the last one.
    """
    contexts = list(dict.fromkeys(example.context.strip() for example in examples))
    if len(contexts) < 2:
        raise DataError("has a single paragraph; at least two are needed, as one is held out for validation")
    held_out = set(contexts[min(HELD_OUT, len(contexts)) - 1 :: HELD_OUT])
    split: tuple[list[Example], list[Example]] = ([], [])
    for example in examples:
        split[example.context.strip() in held_out].append(example)
    return split


def _from_file(path: Path, source: str) -> Squad:
    try:
        return Squad(*hold_out(read_squad_json(path)), source)
    except DataError as error:
        raise DataError(f"--dataset {path}: {error}") from error


def _load(name: str, folder: Path, source: str, offline: bool) -> Squad:
    """SQuAD by the library ``datasets`` with this cache; ``offline``: without asking the hub."""
    import datasets
    from datasets import config

    datasets.logging.set_verbosity_error()
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    # Its environment variable counts only before the import. The first name is the one since datasets 2.21,
    # the second the one before it.
    names = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
    before = {each: value for each, value in vars(config).items() if each in names}
    try:
        vars(config).update(dict.fromkeys(before, True) if offline else {})
        splits = datasets.load_dataset(name, cache_dir=str(folder))
    finally:
        vars(config).update(before)
    train, validation = (
        [Example(*texts) for texts in zip(columns["question"], columns["context"], strict=True)]
        for columns in (splits["train"][:], splits["validation"][:])
    )
    return Squad(train, validation, source)
