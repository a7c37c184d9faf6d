"""Which small faults the tests notice: a seeded sample of mutants, tried by fast tests of their package.

    python benchmarks/mutants.py --seed 25 --count 80 --results mutants.jsonl

``--count`` mutants of each of ``--packages``, in turns, so that a part of a run is a sample, too. Lines in
``--results`` count as done: the same command goes on where it was stopped. A mutant changes one place of a
file in a copy of the tree: a comparison, a number by one, an arithmetic operator, a condition, ``and`` and
``or``, or what a function returns; not texts, errors, annotations and flags. It is killed where a test fails,
or takes three times as long and half a minute more. Exit status: 0; 2 where tests fail without a mutant.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
TESTS = {
    "job": "job/",
    "transform": "predict/test_changes predict/test_ddp predict/test_beside predict/test_refusals",
    "cost": "cost/ predict/test_gpu predict/test_gpu_shapes",
    "simulate": "simulate/ predict/test_schedule report/test_times",
    "convert": "convert/test_et_graph convert/test_link convert/test_timeline convert/test_groups "
    "convert/test_collectives convert/test_pairing convert/test_graph convert/test_stream_waits "
    "convert/test_point_to_point convert/test_structure_step convert/test_hierarchy_and_work",
}
"""Fast tests of each package."""
_OF_MODULES = {  # in place of these
    "scale rank_copies transform/command": "job/ transform/test_scale",
    "blocks layers tensors unroll": "job/ transform/test_layers transform/test_tensors",
    "stages reductions": "job/ transform/test_tensors transform/test_remodel",
    "fsdp": "predict/test_shard",
    "convert/command runs jobs": "chakra_et/test_commands",
    "together": "convert/test_together",
}
_PAIRS = (
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.In, ast.NotIn), (ast.Is, ast.IsNot)),
    *((ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.FloorDiv, ast.Mod), (ast.BitAnd, ast.BitOr)),
    (ast.And, ast.Or),
)
_SWAPPED = {one: other for pair in _PAIRS for one, other in (pair, pair[::-1])}
_LEFT_OUT = (ast.Raise, ast.JoinedStr, ast.Assert)


def places(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes in and under ``node`` that have a mutant, in a fixed order."""
    flags = isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("field", "option")
    if flags or isinstance(node, (ast.Raise, ast.JoinedStr, ast.Assert)):
        return
    if mutant(node):
        yield node
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from places(child)


def mutant(node: ast.AST) -> tuple[str, str, object] | None:
    """What the mutant of a node changes, the field of the node, and its new value; None where it has none."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _SWAPPED:
        return "comparison", "ops", [_SWAPPED[type(node.ops[0])](), *node.ops[1:]]
    if isinstance(node, (ast.BinOp, ast.BoolOp)) and type(node.op) in _SWAPPED:
        text = (ast.Constant, ast.JoinedStr)
        joins = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and isinstance(node.right, text)
        return None if joins else ("operator", "op", _SWAPPED[type(node.op)]())
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        if isinstance(node.value, bool):
            return None
        return "number", "value", node.value + (1 if node.lineno % 2 else -1)
    if isinstance(node, (ast.If, ast.While, ast.IfExp)):
        return "condition", "test", ast.UnaryOp(ast.Not(), node.test)
    if isinstance(node, ast.Return) and ast.unparse(node) not in ("return", "return None"):
        return "return", "value", ast.Constant(None)
    return None


def sample(package: str, seed: int, count: int) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for path in sorted((REPO / "chakra_et" / package).glob("**/*.py")):
        for at, node in enumerate(places(ast.parse(path.read_text()))):
            what, *_ = mutant(node) or ("",)
            file, line = str(path.relative_to(REPO)), getattr(node, "lineno", 0)
            found.append({"file": file, "place": at, "line": line, "what": what})
    return random.Random(f"{seed} {package}").sample(found, min(count, len(found)))


def tested(tree: Path, tests: str, limit: float | None) -> tuple[str, float]:
    """Whether the ``tests`` in ``tree`` fail, and after how many seconds."""
    names = [f"tests/{each}" if each.endswith("/") else f"tests/{each}.py" for each in tests.split()]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", *names]
    begin, own = time.monotonic(), {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=tree, env=os.environ | own, capture_output=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return "killed", time.monotonic() - begin
    return ("killed" if done.returncode else "survived"), time.monotonic() - begin


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seed", type=int, default=25)
    parser.add_argument("--count", type=int, default=80, help="of each package")
    parser.add_argument("--packages", nargs="+", choices=TESTS, default=list(TESTS))
    parser.add_argument("--results", type=Path, default=Path("mutants.jsonl"))
    options = parser.parse_args()
    lines = options.results.read_text().splitlines() if options.results.exists() else []
    done = {(row["file"], row["place"]): row["state"] for row in map(json.loads, lines)}
    chosen = {package: sample(package, options.seed, options.count) for package in options.packages}
    turns = [
        (name, rows[at]) for at in range(options.count) for name, rows in chosen.items() if at < len(rows)
    ]
    limits: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder, options.results.open("a") as results:
        tree = Path(folder, "tree")
        shutil.copytree(REPO, tree, ignore=shutil.ignore_patterns(".git", ".venv", "outputs"), symlinks=True)
        Path(folder, "shared").symlink_to((REPO.parent / "shared").resolve())
        for package, row in turns:
            if (row["file"], row["place"]) in done:
                continue
            file = str(row["file"])
            called = {Path(file).stem, "/".join(Path(file).with_suffix("").parts[-2:])}
            own = (of for names, of in _OF_MODULES.items() if called.intersection(names.split()))
            tests = next(own, TESTS[package])
            if tests not in limits:
                state, seconds = tested(tree, tests, None)
                if state == "killed":
                    parser.error(f"{tests}: a test fails without a mutant")
                limits[tests] = 3 * seconds + 30
            text = (tree / file).read_text()
            content = ast.parse(text)
            node = list(places(content))[int(str(row["place"]))]
            _, name, value = mutant(node) or ("", "", None)
            setattr(node, name, value)
            (tree / file).write_text(ast.unparse(content))
            state, seconds = tested(tree, tests, limits[tests])
            (tree / file).write_text(text)
            done[row["file"], row["place"]] = state
            print(json.dumps({**row, "state": state, "seconds": round(seconds)}), file=results, flush=True)
            print(f"{state:9}{file}:{row['line']} {row['what']}", flush=True)
    for package, rows in chosen.items():
        states = Counter(done.get((row["file"], row["place"]), "not tried") for row in rows)
        print(f"{package}: {states['killed']} of {states['killed'] + states['survived']} killed")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
