"""Which small faults the tests notice: a seeded sample of mutants, each tried by the tests that reach it.

    python benchmarks/mutants.py --seed 25 --count 80 --results mutants.jsonl

``--count`` mutants of each of ``--packages``, in turns, so that a part of a run is a sample, too. Lines in
``--results`` count as done: the same command goes on where it was stopped. A mutant changes one place of a
file in a copy of the tree: a comparison, a number by one, an arithmetic operator, a condition, ``and`` and
``or``, or what a function returns; not texts, errors, annotations and flags. It is killed where a test fails,
or all take three times as long and half a minute more. Which tests reach a line, in their own process, is
found once by coverage and kept beside the results; of many, the quickest run, ``--seconds`` of them in all.
Exit status: 0; 1 where tests fail without a mutant.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree

import numpy  # noqa: F401 - for the processes that are forked
import pytest
from coverage import CoverageData

REPO = Path(__file__).resolve().parents[1]
PACKAGES = ("job", "transform", "cost", "simulate", "convert")
TESTS = (
    *(*PACKAGES, "predict", "report", "info", "stragglers", "export", "validate"),
    *("astra/test_networks.py", "chakra_et/test_commands.py"),
)
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


class Reaching:
    """Which tests reach a line of a file in ``tree``, and how long each takes; kept beside ``results``."""

    def __init__(self, tree: Path, results: Path, most_seconds: float) -> None:
        self.tree, self.most_seconds = tree, most_seconds
        data, times = results.with_suffix(".coverage").resolve(), results.with_suffix(".xml").resolve()
        if not times.exists():
            options = ("--cov=chakra_et", "--cov-context=test", "--cov-report=", f"--junit-xml={times}")
            if fails(tree, [*options, *(f"tests/{each}" for each in TESTS)], 3600, str(data)):
                times.unlink(missing_ok=True)
                raise SystemExit("a test fails without a mutant")
        self.data = CoverageData(str(data))
        self.data.read()
        # Of another folder than this one, as a run goes on in another copy.
        self.files = {file.rpartition("/chakra_et/")[2]: file for file in self.data.measured_files()}
        self.seconds: dict[str, float] = {}
        self.first: dict[str, float] = {}
        """By file: what its first test takes, as this makes the fixtures of all."""
        for case in ElementTree.parse(times).iter("testcase"):
            of, seconds = case.attrib["classname"].replace(".", "/") + ".py", float(case.attrib["time"])
            self.seconds[f"{of}::{case.attrib['name']}"] = seconds
            self.first.setdefault(of, seconds)

    def tests(self, file: str, line: int) -> list[str]:
        """The tests of a line, the quickest first; of a line that runs when the module is imported, those of
        the file."""
        measured = self.files.get(file.removeprefix("chakra_et/"), "")
        of_line = self.data.contexts_by_lineno(measured)
        # A statement of several lines counts as its first.
        begin = max((each for each in of_line if each <= line), default=0)
        found = set(of_line.get(begin, ())) - {""} or set().union(*of_line.values()) - {""}
        names = {context.rpartition("|")[0] for context in found}
        # What sets a fixture up is judged by all tests of the fixture's module.
        shared = {context.partition("::")[0] for context in found if context.endswith("|setup")}
        names |= {name for name in self.seconds if name.partition("::")[0] in shared}
        chosen, left, files = [], self.most_seconds, {""}
        for name in sorted(names & self.seconds.keys(), key=lambda name: (self.seconds[name], name)):
            of = name.partition("::")[0]
            costs = self.seconds[name] + (0 if of in files else self.first[of])
            if not chosen or costs <= left:
                chosen.append(name)
                files.add(of)
                left -= costs
        return chosen

    def judge(self, file: str, line: int) -> str:
        """What becomes of a mutant that is now in the tree."""
        tests = self.tests(file, line)
        limit = 3 * sum(map(self.seconds.__getitem__, tests)) + 30
        return "killed" if tests and fails(self.tree, tests, int(limit)) else "survived"


def fails(tree: Path, arguments: Sequence[str], limit: int, data: str = "") -> bool:
    """Whether a test in ``tree`` fails, or all take more than ``limit`` seconds of a processor. A process of
    its own, which has pytest and numpy from this one."""
    child = os.fork()
    if not child:
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 1)
            os.dup2(nothing.fileno(), 2)
        os.environ |= {"PYTHONPATH": str(tree), "COVERAGE_FILE": data}
        os.chdir(tree)
        sys.path[0] = str(tree)
        os._exit(int(pytest.main(["-q", "-x", "-n", "0", "-p", "no:cacheprovider", *arguments])))
    return os.waitpid(child, 0)[1] != 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seed", type=int, default=25)
    parser.add_argument("--count", type=int, default=80, help="of each package")
    parser.add_argument("--packages", nargs="+", choices=PACKAGES, default=list(PACKAGES))
    parser.add_argument("--seconds", type=float, default=6, help="of tests for one mutant, at most")
    parser.add_argument("--results", type=Path, default=Path("mutants.jsonl"))
    options = parser.parse_args()
    sys.dont_write_bytecode = True
    lines = options.results.read_text().splitlines() if options.results.exists() else []
    done = {(row["file"], row["place"]): row["state"] for row in map(json.loads, lines)}
    chosen = {package: sample(package, options.seed, options.count) for package in options.packages}
    turns = [rows[at] for at in range(options.count) for rows in chosen.values() if at < len(rows)]
    with tempfile.TemporaryDirectory() as folder, options.results.open("a") as results:
        tree = Path(folder, "tree")
        shutil.copytree(REPO, tree, ignore=shutil.ignore_patterns(".git", ".venv", "outputs"), symlinks=True)
        Path(folder, "shared").symlink_to((REPO.parent / "shared").resolve())
        reaching = Reaching(tree, options.results, options.seconds)
        for row in turns:
            file, line = str(row["file"]), int(str(row["line"]))
            if (row["file"], row["place"]) in done:
                continue
            text = (tree / file).read_text()
            content = ast.parse(text)
            node = list(places(content))[int(str(row["place"]))]
            _, name, value = mutant(node) or ("", "", None)
            setattr(node, name, value)
            (tree / file).write_text(ast.unparse(content))
            begin = time.monotonic()
            state = done[row["file"], row["place"]] = reaching.judge(file, line)
            (tree / file).write_text(text)
            row["state"], row["seconds"] = state, round(time.monotonic() - begin)
            print(json.dumps(row), file=results, flush=True)
            print(f"{state:9}{file}:{line} {row['what']}", flush=True)
    for package, rows in chosen.items():
        states = Counter(done.get((row["file"], row["place"]), "not tried") for row in rows)
        print(f"{package}: {states['killed']} of {states['killed'] + states['survived']} killed")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
