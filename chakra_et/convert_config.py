"""The flags of the conversion scripts, and the table that they end with."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from chakra_et.convert import PairOptions
from chakra_et.convert_sets import Engine, RankResult, SetResult
from chakra_et.emit import CommTypes
from chakra_et.errors import TraceError
from chakra_et.gaps import HostGaps


@dataclass
class ConvertConfig:
    """How a folder of traces is converted."""

    dir: str = field(default="outputs", metadata={"help": "folder with NAME_host.json, NAME_device.json …"})
    name: str = field(default="*", metadata={"help": "only runs whose NAME fits this glob"})
    engine: Engine = field(
        default="native",
        metadata={"help": "our converter, or MLCommons' chakra_trace_link and chakra_converter"},
    )
    workers: int = field(default=0, metadata={"help": "processes, 0: one for each core"})
    timeout: float = field(default=0.0, metadata={"help": "seconds for one rank, 0: no limit"})
    step: str = field(default="all", metadata={"help": "all, or the number of one ProfilerStep"})
    host_gaps: HostGaps = field(
        default="node",
        metadata={"help": "time outside of operators: as nodes, in the next node, or left out"},
    )
    timestamps: bool = field(default=True, metadata={"help": "write start_time_micros"})
    comm_types: CommTypes = field(
        default="schema",
        metadata={"help": "collective types as in the schema, or only those that ASTRA-sim runs"},
    )
    keep_merged: bool = field(
        default=False, metadata={"help": "also write NAME_merged.json: both traces as one"}
    )
    allow_unlinked: bool = field(
        default=False, metadata={"help": "go on although host and device trace hardly match"}
    )

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise ValueError(f"--workers {self.workers} makes no sense; give 1 or more, or 0 for one a core")
        if not self.timeout >= 0:
            raise ValueError(f"--timeout {self.timeout} makes no sense; give seconds, or 0 for no limit")
        if self.step != "all" and not self.step.isdigit():
            raise ValueError(f"--step {self.step} makes no sense; give the number of a ProfilerStep, or all")

    def pair_options(self) -> PairOptions:
        """What one rank's conversion needs to know."""
        return PairOptions(self.step, self.host_gaps, self.timestamps, self.comm_types, self.allow_unlinked)

    @contextlib.contextmanager
    def progress_bar(self, total: int) -> Iterator[Callable[[], None]]:
        """A bar over ``total`` ranks; nothing where the output is not a terminal."""
        if not sys.stderr.isatty() or total < 2:
            yield lambda: None
            return
        from tqdm import tqdm

        with tqdm(total=total, unit="rank", desc="converting") as bar:
            yield lambda: bar.update() and None


def show(results: list[SetResult], config: ConvertConfig) -> int:
    """Print what became of each rank; returns the exit status."""
    rows = [("file", "nodes", "edges", "KB", "linked", "left out", "steps ms", "result")]
    sentences = []
    for result in results:
        traces = result.traces
        for rank, outcome in sorted(result.ranks.items()):
            file = traces.et_file(rank).name
            if isinstance(outcome, TraceError):
                rows.append((file, "", "", "", "", "", "", "FAILED"))
                sentences.append(f"error: {outcome}")
                continue
            sentences += [f"error: {traces.et_file(rank)}: {text}" for text in outcome.problems]
            rows.append((file, *_figures(outcome, config), "invalid" if outcome.problems else "ok"))
        sentences += [f"error: {text}" for text in result.problems]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for sentence in sentences:
        print(sentence, file=sys.stderr)
    converted = sum(
        isinstance(outcome, RankResult) for result in results for outcome in result.ranks.values()
    )
    failed = sum(result.failed for result in results)
    print(f"{converted} files written to {config.dir}; {failed} of {len(results)} runs with errors.")
    return 1 if failed else 0


def _figures(outcome: RankResult, config: ConvertConfig) -> tuple[str, ...]:
    size = f"{outcome.bytes / 1000:.0f}"
    if config.engine != "native":
        return ("", "", size, "", "", "")
    report = outcome.report
    steps = " ".join(f"{micros / 1000:.1f}" for micros in report.steps_us.values())
    left_out = str(sum(report.losses.values()))
    return (f"{report.nodes:,}", f"{report.edges:,}", size, f"{report.link_rate:.1%}", left_out, steps)
