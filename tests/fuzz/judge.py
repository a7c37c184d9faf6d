"""Is what became of a run right?  Either each rank is refused in one sentence, or its file holds what its
traces held, counted here a second time by other means."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from chakra_et.convert import runs as convert_sets
from chakra_et.convert.pair import PairOptions
from chakra_et.convert.rank import RankResult
from chakra_et.convert.runs import RunOptions
from chakra_et.errors import TraceError
from chakra_et.et import file as et_file
from chakra_et.et.columns import ExecutionTrace
from chakra_et.traces import sets as trace_sets
from chakra_et.traces.device_format import GPU_CATEGORIES, NOT_A_NODE
from chakra_et.validate import check as validate
from tests.simulate.replay_traces import makespan_ns, replay_astra, replay_device

CLOSE = 1.02
HARMLESS = frozenset((*NOT_A_NODE.values(), "sync-record"))


def judge(folder: Path, allow: bool) -> tuple[str, str]:
    """Convert what is in ``folder``: (outcome, what is wrong, "" if nothing is).

    Outcomes: "refused", "part" (some ranks), "problems" (files whose report names a problem), "converted".
    """
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    options = PairOptions(allow_unlinked=allow, timestamps=True)
    try:
        sets = trace_sets.find(folder)
    except TraceError as error:
        return "refused", _bad_sentence(str(error))
    results = convert_sets.convert_sets(sets, options, RunOptions(workers=0, allow_missing_ranks=allow))
    wrong = [f"{name} was changed" for name in before if (folder / name).read_bytes() != before[name]]
    for result in results:
        wrong += [_bad_sentence(text) for text in (*result.problems, *result.notes)]
        for rank, outcome in result.ranks.items():
            path = result.traces.et_file(rank)
            if isinstance(outcome, TraceError):
                wrong += [_bad_sentence(str(outcome))] + ([f"{path} was written"] if path.exists() else [])
            else:
                wrong += _judge_rank(path, outcome, result.traces.pairs[rank].device)
        wrong += _judge_replay(result)
    ranks = [outcome for result in results for outcome in result.ranks.values()]
    good = sum(isinstance(outcome, RankResult) for outcome in ranks)
    outcome = (
        "refused" if not good else
        "part" if good < len(ranks) else
        "problems" if any(result.failed for result in results) else "converted"
    )  # fmt: skip
    return outcome, "; ".join(text for text in wrong if text)[:2_000]


def _bad_sentence(text: str) -> str:
    """What is wrong with a sentence for the user, "" if nothing is."""
    if "internal error" in text or "Traceback" in text:
        return text
    if not text.rstrip().endswith((".", "?", "]")):  # the validator ends with its rule
        return f"no sentence: {text[-200:]}"
    return f"too long a sentence: {text[:200]}" if len(text) > 2_000 else ""


def _judge_rank(path: Path, outcome: RankResult, device: Path) -> list[str]:
    report, trace = outcome.report, et_file.read(path)
    wrong = []
    if not report.conserved():
        wrong.append("counts do not add up")
    if len(trace) != report.nodes or sum(report.nodes_by_kind.values()) != report.nodes:
        wrong.append(f"{len(trace)} nodes in the file, {report.nodes} in the report")
    if len(trace.data_deps.values) != report.edges or sum(report.edges_by_kind.values()) < report.edges:
        wrong.append(f"{len(trace.data_deps.values)} edges in the file, {report.edges} in the report")
    if trace.ids.tolist() != sorted(set(trace.ids.tolist())):
        wrong.append("ids do not rise")
    errors = [str(problem) for problem in validate.check(trace) if problem.severity == "error"]
    if errors and not outcome.problems:
        wrong.append(f"not valid, and nobody said so: {errors[0]}")
    if not any(repair.startswith("device-repair") for repair in report.repairs):
        wrong += _against_the_text(trace, outcome, device)
    return wrong


def _against_the_text(trace: ExecutionTrace, outcome: RankResult, device: Path) -> list[str]:
    """The device trace once more, by json: how many events, and which work on devices."""
    report = outcome.report
    try:
        text = trace_text(device)
        events = [event for event in json.loads(text)["traceEvents"] if isinstance(event, dict)]
    except (ValueError, RecursionError, OSError, EOFError, KeyError):
        return []
    spans = [event for event in events if event.get("ph") == "X"]
    if len(spans) != report.events_in:
        return [f"{len(spans)} events in the text, {report.events_in} in the report"]
    if set(report.losses) - HARMLESS or report.repairs or report.warnings:
        return []
    work = [event for event in spans if event.get("cat") in GPU_CATEGORIES]
    told = Counter(str(event["name"]) for event in work)
    on_gpu = np.flatnonzero(trace.column("stream", -1) >= 0)
    kinds = trace.attributes["kind"]
    kind_of = {int(row): kinds.values[at] for at, row in enumerate(kinds.rows)}
    kept = Counter(trace.names[row] for row in on_gpu if not kind_of[int(row)].endswith("-overhead"))
    if any("ncclDevKernel" in name or "nccl" in name.lower() for name in told):
        return [] if sum(told.values()) == sum(kept.values()) else ["communication on a device is lost"]
    unknown = sum(count for note, count in report.notes.items() if note.startswith("unknown-device-work:"))
    if told <= kept and (kept - told).total() == unknown:
        return []
    return [f"device work differs: {(told - kept) or (kept - told)}"[:300]]


def trace_text(path: Path) -> bytes:
    import gzip

    content = path.read_bytes()
    return gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content


def _judge_replay(result: Any) -> list[str]:
    """Every valid file replays; alone, and if nothing was repaired, in the time that was measured."""
    wrong = []
    for rank, outcome in result.good.items():
        if outcome.problems:
            continue
        trace = et_file.read(result.traces.et_file(rank))
        measured = int(trace.metadata["measured_end_micros"]) - int(trace.start_micros.min())
        for name, simulate in (("device", replay_device), ("astra", replay_astra)):
            took = makespan_ns(simulate(trace)) / 1000
            if name == "device" and not (measured / CLOSE - 5 <= took <= measured * CLOSE + 5):
                wrong.append(f"rank {rank}: {took:.0f} µs replayed, {measured} measured")
            if took <= 0 < measured - 5:
                wrong.append(f"rank {rank}: nothing replayed in {name}")
    return wrong
