"""Commands that write, killed at a random file operation.

    python -m tests.fuzz.kills --kills 60 --seed 1

Each file that is left must be as it was before or as the whole command leaves it, and a run of which only a
part is new must be refused by ``replay``. The command, run again, must leave what it leaves undisturbed. A
conversion is killed in four cases of five, each place of it with equal chance.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from chakra_et import cli
from chakra_et.__main__ import main as command
from tests.fuzz.bases import CAPTURES

Files = dict[str, bytes]
RECORDS = CAPTURES.parent / "flight_recorder"
# What is written, and the words of the command. TRACES is a folder of traces, RUN a run converted from them.
CONVERSIONS = {
    "fresh": "convert TRACES -o OUT",
    "over an older one": "convert TRACES -o OUT",
    "a rank more": "convert TRACES -o OUT",
    "with skeletons": "convert TRACES -o OUT --skeletons on",
    "of damaged traces": "convert DAMAGED -o OUT --allow-truncated --allow-unlinked",
    "of communication records": "convert RECORDS -o OUT",
}
OTHERS = {
    "larger run": "scale RUN --dp 4 -o OUT/larger",
    "bundle": "astra RUN -o OUT --topology dgx-h100",
    "page": "report RUN -o OUT/page.html",
    "tables": "export RUN --format csv -o OUT/tables",
    "timeline": "export RUN -o OUT/timeline",
    "repaired traces": "repair --dir OUT",
}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@dataclass
class KillsConfig:
    """The kills' arguments."""

    kills: int = field(default=60, metadata={"help": "how many commands are killed"})
    seed: int = field(default=2026, metadata={"help": "of all random choices"})


def prepared(folder: Path) -> dict[str, str]:
    """What the words of the commands stand for; the traces of two ranks, whole and cut, and their run."""
    for name in ("traces", "damaged", "made"):
        (folder / name).mkdir()
    for path in (CAPTURES / "torch-2.13").glob("tiny_2gpu*"):
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        name = path.stem if path.suffix == ".gz" else path.name
        (folder / "traces" / name).write_bytes(text)
        cut = name.endswith("rank1_device.json")
        (folder / "damaged" / name).write_bytes(text[: len(text) * 9 // 10] if cut else text)
    place = {"TRACES": "traces", "DAMAGED": "damaged", "RUN": "made/tiny_2gpu"}
    words = {key: str(folder / name) for key, name in place.items()} | {"RECORDS": str(RECORDS)}
    if status := in_a_fork(["convert", words["TRACES"], "-o", str(folder / "made")])[0]:
        raise SystemExit(f"the run can't be converted: status {status}")
    return words


def in_a_fork(words: list[str], last: int = 0) -> tuple[int, int]:
    """(exit status of a command, or the negative number of the signal that ended it, its file operations).

    ``last``: the operation before which it is killed, from 1 on; 0: none.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        status = 70
        with contextlib.suppress(BaseException):
            status = _child(words, last, writing)
        os._exit(status)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        told = answer.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return status, int(told or 0)


def _child(words: list[str], last: int, writing: int) -> int:
    operations = 0

    def see(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal operations
        changes = event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link", "os.truncate")
        if changes or event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITES:
            operations += 1
            if operations == last:
                os.kill(os.getpid(), signal.SIGKILL)

    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    sys.addaudithook(see)
    try:
        status = command(words)
    except SystemExit as stop:
        status = int(stop.code or 0)
    os.write(writing, str(operations).encode())
    return status


def content(folder: Path) -> Files:
    """Files below ``folder`` by relative path, those with hidden names left out."""
    paths = (path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file())
    return {
        str(path): (folder / path).read_bytes()
        for path in paths
        if not any(part.startswith(".") for part in path.parts)
    }


def before(name: str, words: dict[str, str], out: Path) -> None:
    """What is there when the command starts."""
    if name == "repaired traces":
        shutil.copytree(words["DAMAGED"], out)
        return
    out.mkdir()
    if name == "over an older one":
        in_a_fork(["convert", words["TRACES"], "-o", str(out), "--no-timestamps"])
    if name == "a rank more":
        in_a_fork(["convert", words["TRACES"], "-o", str(out), "--ranks", "0", "--allow-missing-ranks"])
    if name in ("page", "timeline"):
        for path in ("page.html", "timeline"):
            (out / path).write_text("older")


def wrong(left: Files, old: Files, new: Files, replayed: Callable[[], int]) -> str:
    """What is wrong with the files ``left`` by a killed command, "" for nothing."""
    for name, text in left.items():
        if text not in (old.get(name), new.get(name)) and not text.startswith(b'{\n "schema_version": 3'):
            return f"{name} is neither the old file nor the new one"
    is_run = any(name.endswith(".et") for name in new)
    if is_run and left not in (old, new) and left and (status := replayed()) != 2:
        return f"replay takes a part of it, status {status}: {sorted(left)}"
    if gone := old.keys() - left.keys() - (old.keys() - new.keys()):
        return f"{gone} have gone"
    return ""


def kill(name: str, line: str, random: Random, words: dict[str, str]) -> str:
    """Kill one command; what is wrong with what it left, "" for nothing."""
    with tempfile.TemporaryDirectory(prefix="kills") as folder:
        whole, out = Path(folder, "whole"), Path(folder, "out")

        def of(place: Path) -> list[str]:
            """The words of the command that writes to ``place``."""
            return [words.get(word, word).replace("OUT", str(place)) for word in line.split()]

        before(name, words, whole)
        old = content(whole)
        first, operations = in_a_fork(of(whole))
        new = content(whole)
        before(name, words, out)
        at = random.randint(1, operations)
        where = f"operation {at} of {operations}"
        if in_a_fork(of(out), at)[0] != -signal.SIGKILL:
            return f"{where}: not killed"
        left = _named(content(out), out, whole)
        if each := wrong(left, old, new, lambda: in_a_fork(["replay", str(_run(new, out))])[0]):
            return f"{where}: {each}"
        if name == "larger run" and left:  # which refuses to replace a run, whoever made it
            return ""
        again, _ = in_a_fork(of(out))
        after = _named(content(out), out, whole)
        hidden = [path.name for path in out.iterdir() if path.name.startswith(".")]
        if again != first or after != new or hidden and name in CONVERSIONS:
            differ = sorted(each for each in after | new if after.get(each) != new.get(each))
            return f"{where}: run again: status {again}, {differ} differ, {hidden} left"
    return ""


def _named(found: Files, out: Path, whole: Path) -> Files:
    """The files as they would be in ``whole``, whose path some name."""
    return {name: text.replace(str(out).encode(), str(whole).encode()) for name, text in found.items()}


def _run(new: Files, out: Path) -> Path:
    """The run of which ``new`` are the files."""
    name = next(name for name in sorted(new) if name.endswith(".0.et"))
    return out / name.removesuffix(".0.et")


def kills(config: KillsConfig) -> list[str]:
    """A line for each kill that left something wrong."""
    random, found = Random(config.seed), []
    with tempfile.TemporaryDirectory(prefix="kills") as folder:
        words = prepared(Path(folder))
        for number in range(config.kills):
            cases = CONVERSIONS if random.random() < 0.8 else OTHERS
            name = random.choice(sorted(cases))
            if each := kill(name, cases[name], random, words):
                found.append(f"{number} ({name}): {each}")
                print(found[-1], file=sys.stderr, flush=True)
    return found


def main() -> int:
    config = cli.parse(KillsConfig, description=__doc__.splitlines()[0])
    found = kills(config)
    print(f"{config.kills} kills, seed {config.seed}: {len(found)} wrong")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
