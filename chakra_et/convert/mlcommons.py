"""Convert a rank with MLCommons' own tools, to compare their result with ours.

chakra_trace_link and chakra_converter run as processes in a scratch folder, with absolute paths and with a
recursion limit and stack size for deep graphs, as the converter's search for cycles is recursive.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from chakra_et import files
from chakra_et.errors import TraceError
from chakra_et.traces.records import open_trace
from chakra_et.traces.sets import Pair

PACKAGE = "chakra.src"
RECURSION = """
import sys, threading
sys.setrecursionlimit(10_000_000)
threading.stack_size(1 << 30)
from {module} import main
outcome = []
def run():
    try:
        main()
        outcome.append(0)
    except SystemExit as stop:
        outcome.append(stop.code)
thread = threading.Thread(target=run)
thread.start()
thread.join()
sys.exit(outcome[0] if outcome else 1)
"""


def convert(pair: Pair, output: Path) -> None:
    """Convert one rank with MLCommons' tools.

    Raises ``TraceError`` if a tool is not installed or fails; ``output`` is then unchanged.
    """
    if pair.host is None:
        raise TraceError(f"{pair.device}: --engine mlcommons needs a host trace too; use --engine native.")
    with files.scratch_folder(output.resolve()) as folder:
        linked, result = folder / "linked.json", folder / "result.et"
        _run(
            pair, linked, f"{PACKAGE}.trace_link.trace_link",
            "--rank", str(max(pair.rank, 0)), "--chakra-host-trace", str(_plain(pair.host, folder)),
            "--chakra-device-trace", str(_plain(pair.device, folder)), "--output-file", str(linked),
        )  # fmt: skip
        _run(
            pair, result, f"{PACKAGE}.converter.converter",
            "--log-filename", os.devnull, "PyTorch", "--input", str(linked), "--output", str(result),
        )  # fmt: skip
        files.copy(result, output)


def _run(pair: Pair, output: Path, module: str, *arguments: str) -> None:
    tool = module.rsplit(".", 1)[1]
    done = subprocess.run(
        [sys.executable, "-c", RECURSION.format(module=module), *arguments],
        cwd=output.parent, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
    )  # fmt: skip
    if done.returncode == 0 and output.is_file():
        return
    if "No module named" in done.stderr or "et_replay" in done.stderr:
        raise TraceError(
            "--engine mlcommons: chakra_trace_link or one of its requirements (et_replay, "
            "HolisticTraceAnalysis) is not installed; run ./install_chakra_tools.sh."
        )
    lines = [line for line in done.stderr.splitlines() if "Error" in line]
    reason = lines[-1] if lines else f"status {done.returncode}" if done.returncode else "it wrote no file"
    raise TraceError(f"{pair.device}: {tool} failed ({reason}); try --engine native.")


def _plain(path: Path, folder: Path) -> Path:
    """The absolute path of ``path``, decompressed into ``folder`` if it is a gzip file."""
    with open(path, "rb") as file:
        if file.read(2) != b"\x1f\x8b":
            return path.resolve()
    plain = folder / path.name.removesuffix(".gz")
    with open_trace(path) as source, open(plain, "wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
    return plain
