"""One rank's files: convert a pair of traces, repaired if need be, check the result and write it.

A file tells how and from what it was made, so that a later run can keep it instead of making it again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from chakra_et import files
from chakra_et.convert import pair as convert
from chakra_et.convert.pair import PairOptions
from chakra_et.convert.report import RankReport
from chakra_et.errors import TraceError, UnreadableTrace
from chakra_et.et import file as et_file
from chakra_et.et.columns import ExecutionTrace
from chakra_et.traces.sets import Pair

Engine = Literal["native", "mlcommons"]
Groups = dict[int, tuple[str, str, tuple[int, ...]]]
LISTED_REPAIRS = 20


@dataclass(frozen=True)
class RankJob:
    """One rank's conversion, as it is handed to a worker process. ``keep``: a file that was made in this way
    from these traces is read back."""

    pair: Pair
    output: Path
    options: PairOptions
    engine: Engine = "native"
    merged: Path | None = None
    keep: bool = False


@dataclass
class RankResult:
    """``problems``: what the validator found wrong with the file, one sentence each. ``communication``: its
    communication nodes, to hold against the other ranks'. ``process``: host, process id and start of the
    trace, which no two ranks share. ``kept``: the file is of an earlier run."""

    report: RankReport
    communication: ExecutionTrace | None = None
    groups: Groups = field(default_factory=dict)
    world_size: int = 1
    process: tuple[str, int, int] = ("", 0, 0)
    bytes: int = 0
    problems: list[str] = field(default_factory=list)
    kept: bool = False


def convert_rank(job: RankJob) -> RankResult:
    """Convert one pair and write its file. Traces that can't be read are repaired into a copy first.

    Raises ``TraceError``; then the output is as it was.
    """
    if job.keep and (kept := _read_back(job)):
        return kept
    if job.engine == "mlcommons":
        from chakra_et.convert import mlcommons

        mlcommons.convert(job.pair, job.output, job.merged)
        return RankResult(RankReport(max(job.pair.rank, 0)), bytes=job.output.stat().st_size)
    with contextlib.ExitStack() as stack:
        converted = _convert(job, stack)
        converted.trace.metadata |= {
            "process_groups": json.dumps(converted.groups, separators=(",", ":")),
            "conversion_options": options_text(job.options),
            "trace_bytes": _trace_bytes(job.pair),
        }
        result = _result(job, converted.trace, converted.report, converted.groups)
        et_file.write(job.output, converted.trace)
        if job.merged:
            from chakra_et.convert import merged

            merged.write(job.merged, converted.rank)
    result.bytes = job.output.stat().st_size
    return result


def options_text(options: PairOptions) -> str:
    """What of the options shapes a file."""
    shape = {name: getattr(options, name) for name in ("step", "host_gaps", "timestamps", "comm_types")}
    manifest = zlib.crc32(repr((options.groups, options.world_size, options.hosts)).encode())
    return json.dumps(shape | {"manifest": manifest}, separators=(",", ":"))


def _trace_bytes(pair: Pair) -> str:
    """Sizes of both traces, unpacked, modulo 2**32: alike for a trace and its gzip (RFC 1952, ISIZE)."""
    return f"{_unpacked(pair.host)} {_unpacked(pair.device)}"


def _unpacked(path: Path) -> int:
    if path.suffix != ".gz" or path.stat().st_size < 4:
        return path.stat().st_size % 2**32
    with open(path, "rb") as file:
        file.seek(-4, os.SEEK_END)
        return int.from_bytes(file.read(4), "little")


def _convert(job: RankJob, stack: contextlib.ExitStack) -> convert.Converted:
    """The conversion; of repaired copies, in a folder of ``stack``, where the originals can't be read."""
    pair, repairs = job.pair, {}
    while True:
        try:
            converted = convert.convert_pair(pair, job.options)
            break
        except UnreadableTrace as error:
            kind = "host" if error.path == pair.host else "device"
            if getattr(pair, kind) != getattr(job.pair, kind):
                raise _of_originals(error, pair, job.pair) from None
            folder = stack.enter_context(files.scratch_folder(job.output))
            pair = dataclasses.replace(pair, **{kind: _repair(kind, job, folder, repairs, error)})
        except TraceError as error:
            raise _of_originals(error, pair, job.pair) from None
    if repairs:
        converted.report.repairs |= repairs
        converted.trace.metadata["conversion_report"] = json.dumps(
            converted.report.as_dict(), separators=(",", ":")
        )
    return converted


def _repair(kind: str, job: RankJob, folder: Path, repairs: dict[str, int], error: TraceError) -> Path:
    """A repaired copy of one trace; raises ``error`` where there is nothing to repair."""
    from chakra_et.repair import file as repair

    copy = folder / f"{kind}.json"
    report = repair.repair_file(getattr(job.pair, kind), output=copy, limits=job.options.limits)
    if not report.changed:
        raise error
    for change in report.repairs[:LISTED_REPAIRS]:
        repairs[f"{kind} trace, {change}"] = 1
    if further := len(report.repairs[LISTED_REPAIRS:]):
        repairs[f"{kind} trace, further repairs (fix_host_traces.py --dry-run lists them)"] = further
    return copy


def _of_originals(error: TraceError, pair: Pair, originals: Pair) -> TraceError:
    """The error with the names of the files that the user knows."""
    text = str(error)
    for kind in ("host", "device"):
        used, original = getattr(pair, kind), getattr(originals, kind)
        if used != original:
            text = text.replace(str(used), f"{original} (repaired)")
    return TraceError(text)


def _result(job: RankJob, trace: ExecutionTrace, report: RankReport, groups: Groups) -> RankResult:
    from chakra_et.validate import check as validate

    of_file = {str(number): list(ranks) for number, (_, _, ranks) in groups.items() if ranks}
    found = validate.check(trace, of_file or None, str(job.output))
    said = trace.metadata
    return RankResult(
        report,
        trace.communication(),
        groups,
        said["world_size"],
        (said["clock_domain"], said["pid"], said["trace_start_ns"]),
        problems=[str(problem).removeprefix("error: ") for problem in found if problem.severity == "error"],
    )


def _read_back(job: RankJob) -> RankResult | None:
    """The result that the output was written with; None if it is older than its traces, made in another way,
    damaged or not valid."""
    written = [job.output] + ([job.merged] if job.merged else [])
    try:
        made = min(path.stat().st_mtime_ns for path in written)
        if made < max(path.stat().st_mtime_ns for path in (job.pair.host, job.pair.device)):
            return None
        trace = et_file.read(job.output)
        said = trace.metadata
        told = said["conversion_options"], said["trace_bytes"]
        if told != (options_text(job.options), _trace_bytes(job.pair)):
            return None
        groups = {
            int(number): (str(name), str(description), tuple(ranks))
            for number, (name, description, ranks) in json.loads(said["process_groups"]).items()
        }
        result = _result(job, trace, RankReport(**json.loads(said["conversion_report"])), groups)
        result.bytes, result.kept = job.output.stat().st_size, True
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return None if result.problems else result
