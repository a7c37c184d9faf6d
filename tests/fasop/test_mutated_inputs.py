"""Files with mistakes: each gives an answer or one sentence, never a traceback, and soon.

More, with other seeds: ``python -m tests.fasop.test_mutated_inputs FIRST_SEED COUNT``.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fasop.__main__ import main
from fasop.inputs.clusters import PRESETS as CLUSTERS
from fasop.inputs.costs import PUBLISHED

SECONDS = 5.0  # of the CPU, that a file may take
VALUES: list[Any] = [
    *(None, -1, 0, 1, 2, 3, 7, 10**6, 10**9, 10**30, -64, 0.5, 1e-300, 1e300),
    *(float("nan"), float("inf"), -float("inf"), "", "x", "1e9", "0-3", True, False, [], [1], ["a", "a"]),
    *([None], {}, {"a": 1}, {"nodes": 3}),
]
CHANGES = ("missing", "doubled", "halved", "one more", "all alike")
LAYOUTS = {
    "even": {"model": "mine", "cluster": "C", "tp": 1, "dp": 2, "mbs": 2, "layers": "2-1-1", "zero": 1,
             "recompute": "full", "measured": 1.5, "nodes": ["A100", "A10"]},
    "listed": {"model": "mine", "cluster": "C", "stages": [
        {"layers": 2, "replicas": [{"gpu": "A100", "gpus": 2, "mbs": 2, "node": "a"}]},
        {"layers": 2, "recompute": "full", "replicas": [{"gpu": "A10", "gpus": 4, "mbs": 1},
                                                        {"gpu": "A100", "gpus": 2, "mbs": 1, "node": "a"}]},
    ]},
}  # fmt: skip


def documents(folder: Path) -> dict[str, Any]:
    """A right file of each kind, small enough that a plan takes a moment."""
    small = {"hidden": 1024, "seq": 512, "layers": 4, "vocab": 30522, "heads": 16, "global_batch": 8}
    small |= {
        "d_kv": 64,
        "kv_heads": 8,
        "ffn": 4096,
        "experts": 2,
        "top_k": 1,
        "gated": True,
        "costs": "bert-large",
    }
    clusters = yaml.safe_load(CLUSTERS.read_text(encoding="utf-8"))["clusters"]
    mine = copy.deepcopy(clusters["nodes-of-4"])
    mine["gpus"]["A10"]["nodes"] = 2
    mine["gpus"]["A100"] |= {"reserved_gib": 1.0}
    mine["gpus"]["A100"] |= {"hosts": ["left"], "queue": "all", "inter_latency": 1e-5, "speed": 1.1}
    mine["links"] = [
        {"between": ["A100", "A10"], "bandwidth": 10e9, "latency": 1e-4},
        {"between": ["A10", "A10"], "bandwidth": 10e9},
    ]
    costs = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    costs["entries"] = [entry for entry in costs["entries"] if entry["model"] == "bert-large"]
    for table in ("growth", "growth_hpdc24"):
        costs[table] = (
            {"bert-large": costs[table]["bert-large"]} if "bert-large" in costs.get(table, {}) else {}
        )
    costs["models"] = {"bert-large": costs["models"]["bert-large"]}
    found = {
        "models.yaml": {"models": {"mine": small}},
        "clusters.yaml": {"clusters": {"nodes-of-4": clusters["nodes-of-4"], "mine": mine}},
        "costs.json": costs,
        "layouts.yaml": {"layouts": LAYOUTS},
    }
    write(folder, found)
    words = [*command(folder, "models.yaml"), "--json", "--top", "1", "--pp", "2"]
    ways = [["--tp", "1", "--mbs", "1", "--dp", "2"], ["--per-stage"], ["--interleave"]]
    made = [json.loads(ran([*words, *way])[1]) for way in ways]
    return {**found, "plans.json": {"format": 2, "plans": [each["plans"][0] for each in made]}}


def write(folder: Path, found: dict[str, Any]) -> None:
    for name, document in found.items():
        text = json.dumps(document) if name.endswith(".json") else yaml.safe_dump(document)
        (folder / name).write_text(text.replace("cluster: C", f"cluster: {folder}/clusters.yaml:mine"))


def command(folder: Path, name: str, choice: int = 0, rank: int = 1) -> list[str]:
    """What reads that file."""
    if name == "plans.json":
        what = ["simulate", "export", "evaluate"][choice % 3]
        return [what, str(folder / name), "--rank", str(rank)]
    both = ["--models-file", str(folder / "models.yaml"), "--costs", str(folder / "costs.json")]
    if name == "layouts.yaml":
        return ["evaluate", str(folder / name), *both]
    model = "bert-large" if name == "costs.json" else "mine"
    if name == "costs.json":
        both = [*both[2:], "--global-batch", "8", *(["--cost-model", "hpdc24"] if choice % 2 else [])]
    return ["plan", "--model", model, "--cluster", f"{folder}/clusters.yaml:mine", *both, "--workers", "1"]


def ran(words: list[str]) -> tuple[int, str, str]:
    """Status and output of a command; a warning is an error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            status = main(words)
        except SystemExit as stop:
            status = int(stop.code or 0)
    return status, out.getvalue(), err.getvalue()


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key, each in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*path, key)
        if isinstance(each, dict | list):
            yield from places(each, (*path, key))


def mutated(document: Any, chance: random.Random) -> tuple[Any, str]:
    """The document with one or two values changed, and what was."""
    changed, said = copy.deepcopy(document), []
    for _ in range(chance.choice((1, 1, 2))):
        if not (paths := list(places(changed))):
            break
        # Long lists of numbers would take most of the changes.
        path = chance.choice(chance.choices(paths, k=2) + [min(chance.choices(paths, k=4), key=len)])
        holder = changed
        for key in path[:-1]:
            holder = holder[key]
        new, old = chance.choice([chance.choice(VALUES), chance.choice(CHANGES)]), holder[path[-1]]
        if new == "missing":
            del holder[path[-1]]
        elif new in CHANGES and isinstance(old, list) and old:
            alike = [chance.choice((*VALUES, *old))] * len(old)
            holder[path[-1]] = [old * 2, old[: len(old) // 2], [*old, old[-1]], alike][CHANGES.index(new) - 1]
        elif new in CHANGES and isinstance(old, int | float):
            holder[path[-1]] = type(old)({"doubled": old * 2, "halved": old * 0.5}.get(new, old + 1))
        elif new not in CHANGES:
            holder[path[-1]] = copy.deepcopy(new)
        said.append(f"{'.'.join(map(str, path))} = {new!r:.40}")
    return changed, "; ".join(said)


def problem(words: list[str]) -> str:
    """What is wrong with the way that a command ended; "" for nothing."""
    begin = time.process_time()
    try:
        status, out, err = ran(words)
    except Exception:
        return traceback.format_exc()
    if time.process_time() - begin > SECONDS:
        return f"took {time.process_time() - begin:.1f} s"
    sentences = err.strip().splitlines()
    if status not in (0, 2):
        return f"status {status}"
    # Every bad layout of a file has its sentence.
    most = 2 if words[0] == "evaluate" else 1
    if not (1 <= len(sentences) <= most if status else not sentences):
        return f"status {status}, {len(sentences)} sentences: {err[:500]}"
    if status and (len(err) > 700 * most or not all(line.endswith((".", "?", ")")) for line in sentences)):
        return f"no sentence: {err[:1000]}"
    if "nan" in out.split() or "inf" in out.split():
        return f"a number that is none: {out[:500]}"
    return ""


def failures(folder: Path, seed: int, count: int) -> list[str]:
    """What ``count`` files of each kind do that they should not."""
    found, chance, failed = documents(folder), random.Random(seed), []
    write(folder, found)
    for name in found:
        assert ran(command(folder, name))[0] == 0
    for index in range(count):
        for name, document in found.items():
            changed, said = mutated(document, chance)
            write(folder, {name: changed})
            for choice in range(4) if name == "plans.json" else [index]:
                words = command(folder, name, choice, 1 + index % 3)
                if wrong := problem(words):
                    failed.append(f"seed {seed}, {index}, {words}: {said}\n{wrong}")
            write(folder, {name: document})
    return failed


@pytest.mark.parametrize("seed", [1])
def test_a_mistake_in_a_file_is_one_sentence(tmp_path: Path, seed: int) -> None:
    assert failures(tmp_path, seed, 15) == []


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        print("\n\n".join(failures(Path(name), int(sys.argv[1]), int(sys.argv[2]))))
