"""Convert the files of one rank: repair the traces if necessary, convert, check the result and write it.

The metadata of an .et file records its options and the sizes of its traces, so that a later run can keep it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from chakra_et import files, jobs
from chakra_et.convert.pair import Converted, PairOptions, convert_pair
from chakra_et.convert.report import RankReport
from chakra_et.errors import TraceError, UnreadableTrace
from chakra_et.et import file as et_file
from chakra_et.et.columns import ExecutionTrace
from chakra_et.et.encode import encode
from chakra_et.findings import sentence
from chakra_et.names import Side
from chakra_et.traces.records import open_trace
from chakra_et.traces.sets import Pair
from chakra_et.validate import check as validate

Engine = Literal["native", "mlcommons"]
Groups = dict[int, tuple[str, str, tuple[int, ...]]]
CUT = re.compile(r": (truncated|gz-truncated)\b")


@dataclass(frozen=True)
class RankJob:
    """The conversion of one rank, as passed to a worker process.

    ``output``: the file that the run will have; it is written to ``scratch``.
    ``keep``: reuse an existing output that was made with these options from these traces.
    """

    pair: Pair
    output: Path
    scratch: Path
    options: PairOptions
    engine: Engine = "native"
    keep: bool = False

    @property
    def written(self) -> Path:
        return self.scratch / self.output.name


@dataclass(eq=False, repr=False)
class RankResult:
    """The result for one rank.

    ``communication``: the communication nodes, for the checks across ranks. ``process``: host, process id and
    start of the trace, which differ between ranks. ``window``: start and end of the recording by the clock of
    its host, ns. ``problems``: errors of the validator, one sentence each. ``kept``: the file is from an
    earlier run. ``sha256``: of the file, and ``device_sha256``: of the device trace, where taken beside other
    work.
    """

    report: RankReport
    communication: ExecutionTrace | None = None
    groups: Groups = field(default_factory=dict)
    world_size: int = 1
    process: tuple[str, int, int] = ("", 0, 0)
    window: tuple[int, int] = (0, 0)
    bytes: int = 0
    sha256: str = ""
    device_sha256: str = ""
    problems: list[str] = field(default_factory=list)
    kept: bool = False


def convert_rank(job: RankJob) -> RankResult:
    """Convert one pair and write its file. Damaged traces are first repaired into a copy.

    Raises ``TraceError``.
    """
    if job.keep and job.engine == "native" and (kept := _read_back(job)):
        files.link(job.output, job.written)
        return kept
    if job.engine == "mlcommons":
        convert_by_mlcommons(job.pair, job.written)
        problems = _errors(et_file.read(job.written), {}, job)
        size = job.written.stat().st_size
        return RankResult(RankReport(max(job.pair.rank, 0)), bytes=size, problems=problems)
    with contextlib.ExitStack() as stack:
        trace, report, groups, digest = _convert(job, stack)
        trace.metadata |= {
            "process_groups": json.dumps(groups, separators=(",", ":")),
            "conversion_options": options_text(job.options),
            "trace_bytes": _trace_bytes(job.pair),
        }
        result = _result(job, trace, report, groups)
        if job.options.two_processes and 256 * len(trace) > jobs.LARGE:  # about 256 bytes per node
            check = functools.partial(_errors, trace, groups, job)
            result.sha256, problems = _write_in_two(job.written, trace, check)
        else:
            et_file.write(job.written, trace)
            problems = _errors(trace, groups, job)
    result.problems[:0] = problems
    result.bytes = job.written.stat().st_size
    result.device_sha256 = digest or files.sha256(job.pair.device)
    return result


def _write_in_two(path: Path, trace: ExecutionTrace, check: Callable[[], list[str]]) -> tuple[str, list[str]]:
    """``et.file.write`` by two processes in turns, which tell each other where the next block goes.

    Returns the file's SHA-256, which a third process takes meanwhile, and what a fourth finds by ``check``.
    """
    with files.atomic_file(path) as file, contextlib.ExitStack() as stack:
        pipes = [os.pipe(), os.pipe(), os.pipe()]  # a turn of either process, and the blocks that are there
        for end in itertools.chain(*pipes):
            stack.callback(os.close, end)
        os.write(pipes[0][1], bytes(8))

        def write(part: int) -> None:
            with open(file.name, "r+b") as own:
                for block in encode(trace, part, 2):
                    at = int.from_bytes(os.read(pipes[part][0], 8), "little")
                    os.write(pipes[1 - part][1], (at + len(block)).to_bytes(8, "little"))
                    own.seek(at)
                    own.write(block)
                    own.flush()
                    os.write(pipes[2][1], struct.pack("qq", at, at + len(block)))
            os.write(pipes[2][1], struct.pack("qq", -1, part))

        def digest() -> str:
            found, at, ends, parts = hashlib.sha256(), 0, dict[int, int](), {0, 1}
            with open(file.name, "rb", buffering=0) as source:  # no block before it is there
                while parts:
                    start, end = struct.unpack("qq", os.read(pipes[2][0], 16))
                    if start < 0:
                        parts.remove(end)
                    ends[start] = end
                    while at in ends:
                        found.update(source.read(ends[at] - at))
                        at = ends[at]
            return found.hexdigest()

        writes = [functools.partial(write, part) for part in (0, 1)]
        *_, sha256, problems = jobs.together([*writes, digest, check])
    return sha256, problems


def options_text(options: PairOptions) -> str:
    """Options that affect the output (cache key)."""
    kernels = 0
    with contextlib.suppress(OSError):  # the conversion reports the error
        kernels = zlib.crc32(files.read_bytes(path)) if (path := options.comm_kernels) else 0
    shape = {"step": options.step, "timestamps": options.timestamps, "comm_kernels": kernels}
    shape["manifest"] = zlib.crc32(repr(options.manifest.content).encode())
    return json.dumps(shape, separators=(",", ":"))


def _trace_bytes(pair: Pair) -> str:
    """Uncompressed sizes of the traces modulo 2**32, the same for a trace and its gzip (RFC 1952, ISIZE)."""
    sizes = []
    for path in pair.files:
        size = path.stat().st_size
        if path.suffix == ".gz" and size >= 4:
            with path.open("rb") as file:
                file.seek(-4, os.SEEK_END)
                size = int.from_bytes(file.read(4), "little")
        sizes.append(str(size % 2**32))
    return " ".join(sizes)


def _convert(job: RankJob, stack: contextlib.ExitStack) -> Converted:
    """Convert the pair; unreadable traces are repaired first, in scratch folders that ``stack`` removes."""
    pair, original = job.pair, dict[str, Path]()  # copy → what it is of
    while True:
        try:
            converted = convert_pair(pair, job.options)
            return converted if pair == job.pair else converted._replace(device_sha256="")
        except TraceError as error:
            path = error.path if isinstance(error, UnreadableTrace) else None
            if path is None or str(path) in original:
                text = str(error)
                for copy, of in original.items():
                    text = text.replace(copy, f"{of} (repaired)")
                raise TraceError(text) from None
            from chakra_et.repair import file as repair

            side: Side = "host" if path == pair.host else "device"
            repaired = stack.enter_context(files.scratch_folder(job.written)) / f"{side}.json"
            if not repair.repair_file(path, output=repaired, max_bytes=job.options.max_bytes).changed:
                raise
            original[str(repaired)] = path
            changed: dict[str, Any] = {side: repaired}
            pair = dataclasses.replace(pair, **changed)


def _errors(trace: ExecutionTrace, groups: Groups, job: RankJob) -> list[str]:
    of_file = {str(number): list(ranks) for number, (_, _, ranks) in groups.items() if ranks}
    found = validate.check(trace, of_file or None, str(job.output))
    return [str(each).removeprefix("error: ") for each in found if each.severity == "error"]


def _result(job: RankJob, trace: ExecutionTrace, report: RankReport, groups: Groups) -> RankResult:
    start = trace.metadata_int("trace_start_ns") or 0
    length = (trace.metadata_int("measured_end_micros") or 0) * 1000
    return RankResult(
        report,
        trace.communication(),
        groups,
        trace.metadata_int("world_size") or 1,
        (trace.metadata_str("clock_domain"), trace.metadata_int("pid") or 0, start),
        (start, start + length),
        problems=[] if job.options.allow_truncated else truncation(job.pair, report),
    )


def is_cut(report: RankReport, side: Side) -> bool:
    """Whether the repair found that this trace of the rank was cut off."""
    return any(key.startswith(f"{side}-repair:") and CUT.search(key) for key in report.repairs)


def truncation(pair: Pair, report: RankReport) -> list[str]:
    """One sentence per indication that device work is missing."""
    lost = "was cut off, so its last events, the device work, are lost"
    keys = "missing-gpu-work", "launch-without-work", "missing-communication"
    reasons = [lost] if is_cut(report, "device") else []
    reasons += [f"{sentence(key)} ({count})" for key in keys if (count := report.warnings.get(key))]
    remedy = "record it again, or use --allow-truncated."
    return [f"{pair.device}: {reason}; {remedy}" for reason in reasons]


def _read_back(job: RankJob) -> RankResult | None:
    """The result stored in an existing output. None if that is older than its traces, was made with other
    options, is damaged or not valid."""
    try:
        if job.output.stat().st_mtime_ns < max(path.stat().st_mtime_ns for path in job.pair.files):
            return None
        trace = et_file.read(job.output)
        recorded = trace.metadata_str("conversion_options"), trace.metadata_str("trace_bytes")
        if recorded != (options_text(job.options), _trace_bytes(job.pair)):
            return None
        stored_groups = json.loads(trace.metadata_str("process_groups"))
        report = RankReport.from_dict(json.loads(trace.metadata_str("conversion_report")))
        groups = {
            int(number): (str(name), str(description), tuple(ranks))
            for number, (name, description, ranks) in stored_groups.items()
        }
        result = _result(job, trace, report, groups)
        result.problems += _errors(trace, groups, job)
        result.bytes, result.kept = job.output.stat().st_size, True
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return None if result.problems else result


# ---- MLCommons' own tools, to compare their result with ours ----
#
# They run as processes in a scratch folder, with a recursion limit and a stack for deep graphs, as the
# converter's search for cycles is recursive.

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


def convert_by_mlcommons(pair: Pair, output: Path) -> None:
    """Convert one rank with MLCommons' tools.

    Raises ``TraceError`` if a tool is not installed or fails; ``output`` is then unchanged.
    """
    if pair.host is None:
        raise TraceError(f"{pair.device}: --engine mlcommons needs a host trace too; use --engine native.")
    with files.scratch_folder(output.resolve()) as folder:
        linked, result = folder / "linked.json", folder / "result.et"
        _run(
            pair, linked, f"{PACKAGE}.trace_link.trace_link",
            "--rank", str(max(pair.rank, 0)), "--chakra-host-trace", _plain(pair.host, folder),
            "--chakra-device-trace", _plain(pair.device, folder), "--output-file", str(linked),
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
    if "No module named" in done.stderr or "Failed to import et_replay" in done.stderr:
        raise TraceError(
            "--engine mlcommons: chakra_trace_link or one of its requirements (et_replay, "
            "HolisticTraceAnalysis) is not installed; run ./install_chakra_tools.sh."
        )
    lines = [line for line in done.stderr.splitlines() if "Error" in line]
    reason = lines[-1] if lines else f"status {done.returncode}" if done.returncode else "it wrote no file"
    raise TraceError(f"{pair.device}: {tool} failed ({reason}); try --engine native.")


def _plain(path: Path, folder: Path) -> str:
    """The path of an uncompressed copy in ``folder``."""
    plain = folder / path.name.removesuffix(".gz")
    with open_trace(path) as source, open(plain, "wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
    return str(plain)
