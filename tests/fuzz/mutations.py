"""What can happen to a trace. Each mutation takes a random generator and a text and returns another text.

``BYTES`` know nothing of the format: disks, transfers and writers that ran together. ``FIELDS`` change the
parsed document: other versions, wrong tools, and people who want to fool the converter. ``FILES`` change
which files there are.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from copy import deepcopy
from random import Random
from typing import Any

from tests.fuzz.bases import Run

ODD_VALUES: tuple[Any, ...] = (
    None, True, "", "x", "12", -1, 0, 1, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**400, 0.5, -0.0,
    1e308, float("nan"), float("inf"), [], {}, [[[]]], {"a": {"b": []}}, "\x00", "é\u200b한국어\U0001f600",
    "<script>alert(1)</script>", "../../../etc/passwd", "a\nb\"c\\d", "\ud800", "9" * 5_000, [1] * 1_000,
)  # fmt: skip
JUNK = (
    b",", b",,", b"]", b"}", b"{", b"[", b'"', b"\\", b"\xff\xfe", b"\x00", b"\xef\xbb\xbf", b"NaN", b"\r\n",
    b"1e999", b"}{", b"null", b"-", b"\xed\xa0\x80", b"/*", b'{"nodes": [', b'"traceEvents": [',
)  # fmt: skip


def _span(random: Random, text: bytes) -> tuple[int, int]:
    start = random.randrange(len(text) + 1)
    return start, min(len(text), start + int(random.expovariate(1 / 200)) + 1)


def cut_end(random: Random, text: bytes) -> bytes:
    return text[: random.randrange(len(text) + 1)]


def cut_start(random: Random, text: bytes) -> bytes:
    return text[random.randrange(len(text) + 1) :]


def cut_out(random: Random, text: bytes) -> bytes:
    start, end = _span(random, text)
    return text[:start] + text[end:]


def repeat(random: Random, text: bytes) -> bytes:
    start, end = _span(random, text)
    return text[:end] + text[start:end] * random.choice((1, 1, 3)) + text[end:]


def flip(random: Random, text: bytes) -> bytes:
    changed = bytearray(text)
    for _ in range(random.choice((1, 1, 2, 8, 64))):
        if changed:
            changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


def insert_junk(random: Random, text: bytes) -> bytes:
    for _ in range(random.choice((1, 1, 3))):
        at = random.randrange(len(text) + 1)
        text = text[:at] + random.choice(JUNK) + text[at:]
    return text


def drop_separators(random: Random, text: bytes) -> bytes:
    separator = random.choice((b",", b":", b'"', b"\n", b"}", b"]", b"\\"))
    parts = text.split(separator)
    for _ in range(random.choice((1, 3, 30))):
        if len(parts) > 1:
            at = random.randrange(len(parts) - 1)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return separator.join(parts)


def zero_block(random: Random, text: bytes) -> bytes:
    """A block that a crashed file system never wrote."""
    start = random.randrange(len(text) + 1) // 512 * 512
    return text[:start] + bytes(min(512, len(text) - start)) + text[start + 512 :]


def twice(random: Random, text: bytes) -> bytes:
    return text + random.choice((b"", b"\n", b",", b" \n\n")) + text


def interleave(random: Random, text: bytes) -> bytes:
    """Two writers on one file, in turns of one buffer."""
    size = random.choice((64, 512, 4096))
    other = text.replace(b'"pid":', b'"pid" :').replace(b"1", b"2")
    pieces = [part[at : at + size] for at in range(0, len(text), size) for part in (text, other)]
    return b"".join(pieces)


def windows(random: Random, text: bytes) -> bytes:
    return b"\xef\xbb\xbf" + text.replace(b"\n", b"\r\n")


def other_coding(random: Random, text: bytes) -> bytes:
    return text.decode("utf-8", "replace").encode(random.choice(("utf-16", "utf-8-sig", "utf-32")))


def deep(random: Random, text: bytes) -> bytes:
    """Nesting that a recursive parser does not survive."""
    at = text.find(b":", random.randrange(len(text) + 1)) + 1
    depth = random.choice((300, 100_000))
    left, right = random.choice(((b"[", b"]"), (b'{"a":', b"}")))
    return text[:at] + left * depth + b"0" + right * depth + b"," + text[at:]


BYTES: tuple[Callable[[Random, bytes], bytes], ...] = (
    cut_end, cut_start, cut_out, repeat, flip, insert_junk, drop_separators, zero_block, twice, interleave,
    windows, other_coding, deep,
)  # fmt: skip


def _records(document: dict[str, Any]) -> list[dict[str, Any]]:
    return document["nodes"] if "nodes" in document else document["traceEvents"]


def _holders(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every value inside ``value``."""
    found, todo = [], [value]
    while todo:
        here = todo.pop()
        items = here.items() if isinstance(here, dict) else enumerate(here) if isinstance(here, list) else ()
        for key, inner in items:
            found.append((here, key))
            todo.append(inner)
    return found


def odd_value(random: Random, document: dict[str, Any]) -> None:
    """Some fields, of some records or of the header, get a value that they should not have."""
    for _ in range(random.choice((1, 3, 20))):
        whole = random.random() < 0.1
        holders = _holders(document if whole else random.choice(_records(document)))
        if holders:
            container, key = random.choice(holders)
            container[key] = deepcopy(random.choice(ODD_VALUES))
        if not isinstance(document.get("nodes", document.get("traceEvents")), list) or not _usable(document):
            return


def _usable(document: dict[str, Any]) -> bool:
    records = _records(document)
    return bool(records) and all(isinstance(record, dict) for record in records)


def odd_column(random: Random, document: dict[str, Any]) -> None:
    """One field gets the same odd value in every record."""
    records = _records(document)
    field = random.choice(list(random.choice(records)) or ["name"])
    value = random.choice(ODD_VALUES)
    for record in records:
        record[field] = deepcopy(value)


def drop_field(random: Random, document: dict[str, Any]) -> None:
    records = _records(document)
    field = random.choice(list(random.choice(records)) or ["name"])
    for record in records if random.random() < 0.3 else random.sample(records, min(3, len(records))):
        record.pop(field, None)


def drop_records(random: Random, document: dict[str, Any]) -> None:
    records = _records(document)
    part = random.choice((0.02, 0.3, 0.9))
    records[:] = [record for record in records if random.random() > part]


def double_records(random: Random, document: dict[str, Any]) -> None:
    records = _records(document)
    for record in random.sample(records, min(len(records), random.choice((1, 5, 50)))):
        records.insert(random.randrange(len(records) + 1), json.loads(json.dumps(record)))


def shuffle(random: Random, document: dict[str, Any]) -> None:
    random.shuffle(_records(document))


def swap_values(random: Random, document: dict[str, Any]) -> None:
    """Two records exchange the value of a field: ids, parents, times, correlations that lead elsewhere."""
    records = _records(document)
    for _ in range(random.choice((1, 5, 50))):
        one, other = random.choice(records), random.choice(records)
        fields = sorted(set(one) & set(other))
        if fields:
            field = random.choice(fields)
            one[field], other[field] = other[field], one[field]


def nudge_numbers(random: Random, document: dict[str, Any]) -> None:
    """Times and numbers move a little or far: events overlap, leave their parents, change place."""
    factor = random.choice((1, 10, 1e6, -1))
    for record in random.sample(
        _records(document), min(len(_records(document)), random.choice((1, 10, 100)))
    ):
        numbers = [key for key, value in record.items() if type(value) in (int, float)]
        if numbers:
            key = random.choice(numbers)
            by = random.uniform(-50, 50) * factor
            # Other mutations may have left an integer that no float holds.
            record[key] = record[key] + int(by) if type(record[key]) is int else round(record[key] + by, 3)


def cyclic_parents(random: Random, document: dict[str, Any]) -> None:
    records = _records(document)
    ids = [record.get("id") for record in records]
    for record in random.sample(records, min(len(records), random.choice((1, 5, 500)))):
        for field in ("ctrl_deps", "parent"):
            if field in record:
                record[field] = random.choice([*ids, record.get("id"), 10**9])


FIELDS: tuple[Callable[[Random, dict[str, Any]], None], ...] = (
    odd_value, odd_column, drop_field, drop_records, double_records, shuffle, swap_values, nudge_numbers,
    cyclic_parents,
)  # fmt: skip


def swap_files(random: Random, run: Run) -> None:
    one, other = random.choice(sorted(run)), random.choice(sorted(run))
    run[one], run[other] = run[other], run[one]


def lose_file(random: Random, run: Run) -> None:
    del run[random.choice(sorted(run))]


def pack(random: Random, run: Run) -> None:
    """gzip, whole or damaged."""
    name = random.choice(sorted(run))
    packed = gzip.compress(run.pop(name), 1, mtime=0)
    damage = random.choice((None, None, cut_end, flip, twice, cut_out, zero_block))
    run[f"{name}.gz"] = damage(random, packed) if damage else packed


def another_rank(random: Random, run: Run) -> None:
    """The files of one rank stand under the name of another one too."""
    rank = random.choice((1, 2, 7, 999_999))
    for name in list(run):
        if "rank" not in name and name.endswith(("_host.json", "_device.json")):
            stem, kind = name.rsplit("_", 1)
            run[f"{stem}_rank{rank}_{kind}"] = run[name]


def odd_name(random: Random, run: Run) -> None:
    odd = random.choice(("a b", "q'\"", "한국어", "new\nline", "-x", "<b>", "..", "*?[", "%s{0}", "\udcff"))
    for name in list(run):
        run[odd + name[name.find("_") if "_" in name else 0 :]] = run.pop(name)


FILES: tuple[Callable[[Random, Run], None], ...] = (swap_files, lose_file, pack, another_rank, odd_name)


def mutate(random: Random, run: Run) -> tuple[Run, list[str]]:
    """``run`` after one to three mutations, and their names."""
    run, done = dict(run), []
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        names = sorted(name for name in run if name.endswith(".json"))
        kind = random.choices(("bytes", "fields", "files"), (4, 5, 1))[0] if names else "none"
        if kind == "files":
            change = random.choice(FILES)
            change(random, run)
        elif kind == "bytes":
            change = random.choice(BYTES)
            name = random.choice(names)
            run[name] = change(random, run[name])
            done.append(name)
        elif kind == "fields":
            change = random.choice(FIELDS)
            name = random.choice(names)
            try:
                document = json.loads(run[name])
                if not _usable(document):
                    continue
            except (ValueError, RecursionError, KeyError, TypeError):
                continue  # an earlier mutation has left no document
            change(random, document)
            run[name] = _text(document)
            done.append(name)
        else:
            continue
        done.append(change.__name__)
    return run, done


def _text(document: dict[str, Any]) -> bytes:
    return json.dumps(document, indent=1, ensure_ascii=True).encode()
