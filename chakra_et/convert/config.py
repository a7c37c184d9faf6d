"""The flags of the conversion scripts, how they end, and the table that they end with."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from chakra_et.convert.emit_communication import CommTypes
from chakra_et.convert.pair import PairOptions
from chakra_et.convert.rank import Engine
from chakra_et.convert.runs import RunOptions, default_workers
from chakra_et.graph.gaps import HostGaps
from chakra_et.traces import sets as trace_sets
from chakra_et.traces.limits import DEFAULT_LIMITS, Limits


@dataclass
class ConvertConfig:
    """How a folder of traces is converted."""

    files: tuple[str, ...] = field(
        default=(),
        metadata={"positional": True, "help": "traces of any names, or one folder (default: --dir)"},
    )
    dir: str = field(default="outputs", metadata={"help": "folder with the traces"})
    output: str = field(
        default="", metadata={"help": "folder for the .et files (default: that of the traces)", "short": "-o"}
    )
    host: str = field(default="", metadata={"help": "host trace of one rank; needs --device"})
    device: str = field(default="", metadata={"help": "device trace of one rank; needs --host"})
    name: str = field(default="*", metadata={"help": "only runs whose NAME fits this glob"})
    ranks: str = field(
        default="",
        metadata={
            "help": "only these ranks: 0-7,12, or I/N for every N-th from I on; convert_remaining.py then "
            "finishes the run"
        },
    )
    comm_kernels: str = field(
        default="", metadata={"help": "JSON table of further communication kernels, by name"}
    )
    graph_capture: str = field(
        default="",
        metadata={"help": "device trace of the capture of CUDA or HIP graphs, to name their kernels"},
    )
    max_overhead: float = field(
        default=10.0,
        metadata={"help": "warn where more than this percentage of a critical path is unexplained"},
    )
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
    report: bool = field(default=False, metadata={"help": "print what went in and came out of each rank"})
    allow_unlinked: bool = field(
        default=False,
        metadata={"help": "go on although host and device trace hardly match, or are of two processes"},
    )
    allow_truncated: bool = field(
        default=False,
        metadata={"help": "go on although a trace was cut off or lacks the device's work"},
    )
    allow_missing_ranks: bool = field(
        default=False, metadata={"help": "go on although traces of some ranks are missing"}
    )
    allow_mixed: bool = field(
        default=False, metadata={"help": "go on with a damaged trace that mixes several processes' records"}
    )
    min_records: int = field(
        default=DEFAULT_LIMITS.min_records,
        metadata={"help": "nodes or events that must be left of a damaged trace, or it is refused"},
    )
    max_bytes: int = field(default=8 << 30, metadata={"help": "size of a trace, unpacked"})
    max_ratio: int = field(
        default=DEFAULT_LIMITS.max_ratio, metadata={"help": "unpacked size of a gzip trace over its size"}
    )

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise ValueError(f"--workers must be 1 or more, or 0 for one per core, not {self.workers}")
        if not self.timeout >= 0:
            raise ValueError(f"--timeout must be seconds, or 0 for no limit, not {self.timeout}")
        if self.step != "all" and not (self.step.isascii() and self.step.isdigit()):
            raise ValueError(f"--step must be the number of a ProfilerStep, or all, not {self.step}")
        if bool(self.host) != bool(self.device):
            raise ValueError("--host and --device go together: they name the two traces of one rank")
        if self.host and self.files:
            raise ValueError("give either trace files, or --host and --device")
        if not 0 <= self.max_overhead <= 100:
            raise ValueError(f"--max-overhead must be a percentage, not {self.max_overhead}")
        try:
            trace_sets.rank_choice(self.ranks)
        except ValueError as error:
            raise ValueError(f"--ranks {error}") from None
        self._limits()

    def _limits(self) -> Limits:
        return Limits(
            min_records=self.min_records,
            max_bytes=self.max_bytes,
            max_ratio=self.max_ratio,
            allow_mixed=self.allow_mixed,
        )

    def pair_options(self) -> PairOptions:
        """The options of one rank's conversion."""
        return PairOptions(
            self.step,
            self.host_gaps,
            self.timestamps,
            self.comm_types,
            self.allow_unlinked,
            limits=self._limits(),
            comm_kernels=self.comm_kernels,
            allow_truncated=self.allow_truncated,
            graph_capture=Path(self.graph_capture) if self.graph_capture else None,
        )

    def sets(self) -> list[trace_sets.TraceSet]:
        """The runs that the flags name. Raises ``TraceError`` for files and folders that hold none."""
        output = Path(self.output) if self.output else None
        if output:
            output.mkdir(parents=True, exist_ok=True)
        if self.host:
            return [trace_sets.of_pair(Path(self.host), Path(self.device), output)]
        paths = [Path(name) for name in self.files]
        if len(paths) == 1 and paths[0].is_dir() or not paths:
            return trace_sets.find(paths[0] if paths else Path(self.dir), self.name, output)
        return trace_sets.of_files(paths, output)

    def run_options(self, pairs: int, keep: bool) -> RunOptions:
        """How the runs, ``pairs`` ranks in all, are converted; ``keep``: what is there and valid stays."""
        return RunOptions(
            self.engine,
            self.workers or default_workers(pairs),
            self.timeout,
            self.keep_merged,
            self.allow_missing_ranks,
            trace_sets.rank_choice(self.ranks) if self.ranks else None,
            keep,
        )

    @contextlib.contextmanager
    def progress_bar(self, total: int) -> Iterator[Callable[[], None]]:
        """A bar over ``total`` ranks; nothing where the output is not a terminal."""
        if not sys.stderr.isatty() or total < 2:
            yield lambda: None
            return
        from tqdm import tqdm

        tqdm.monitor_interval = 0  # its thread would be there when workers are forked
        with tqdm(total=total, unit="rank", desc="converting") as bar:
            yield lambda: bar.update() and None
