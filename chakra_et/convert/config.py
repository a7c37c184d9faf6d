"""The flags of the conversion commands, and the options that they stand for."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chakra_et.convert.emit import CommTypes
from chakra_et.convert.graph.gaps import HostGaps
from chakra_et.convert.pair import PairOptions
from chakra_et.convert.rank import Engine
from chakra_et.convert.runs import RunOptions, default_workers
from chakra_et.errors import TraceError
from chakra_et.et.sets import Skeletons
from chakra_et.ranks.cluster import CLUSTERS
from chakra_et.text import list_ranks
from chakra_et.traces import sets as trace_sets
from chakra_et.traces.records import DEFAULT_LIMITS, Limits

FOLDER = "outputs"
RARE = "for damaged or hostile files"


def _flag(default: Any, text: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": text, **metadata})


@dataclass
class ConvertConfig:
    """How a folder of traces is converted."""

    files: tuple[str, ...] = _flag((), "trace files, or one folder (default: --dir)", positional=True)
    dir: str = _flag(FOLDER, "folder with the traces", metavar="FOLDER")
    output: str = _flag(
        "", "folder for the .et files (default: that of the traces)", short="-o", metavar="FOLDER"
    )
    host: str = _flag("", "host trace of one rank; needs --device", metavar="FILE")
    device: str = _flag("", "device trace of one rank; needs --host", metavar="FILE")
    name: str = _flag("*", "convert only runs whose NAME matches this glob", metavar="GLOB")
    ranks: str = _flag(
        "",
        "convert only these ranks: 0-7,12, or I/N for every Nth rank from I on; convert_remaining.py then "
        "finishes the run",
    )
    comm_kernels: str = _flag("", "JSON table of additional communication kernels, by name", metavar="FILE")
    graph_capture: str = _flag(
        "", "device trace of the capture of CUDA or HIP graphs, to name their kernels", metavar="FILE"
    )
    max_overhead: float = _flag(
        10.0, "warn if more than this percentage of a critical path is unexplained", metavar="PERCENT"
    )
    engine: Engine = _flag("native", "this converter, or MLCommons' chakra_trace_link and chakra_converter")
    workers: int = _flag(0, "number of processes; 0: one per core")
    cluster: str = _flag(
        "", "convert on a Dask cluster: local, slurm, or tcp://HOST:PORT of a scheduler", metavar="WHERE"
    )
    step: str = _flag("all", "number of the one ProfilerStep to convert, or all")
    host_gaps: HostGaps = _flag(
        "node", "host time outside operators: as nodes of its own, folded into the next node, or dropped"
    )
    timestamps: bool = _flag(True, "write start_time_micros")
    comm_types: CommTypes = _flag(
        "schema", "collective types of the schema, or only those that ASTRA-sim simulates"
    )
    keep_merged: bool = _flag(False, "also write NAME_merged.json: both traces in one file")
    skeletons: Skeletons = _flag(
        "auto",
        "write NAME.N.skeleton.parquet, what joint questions need of a rank; auto: of more than 64 ranks",
    )
    report: bool = _flag(False, "print the conversion report of each rank: events in, nodes out, losses")
    json: bool = _flag(False, "print JSON: by run and rank the report, the file, and every error")
    allow_unlinked: bool = _flag(
        False, "continue if host and device trace hardly match or come from two processes", group=RARE
    )
    allow_truncated: bool = _flag(
        False, "continue if a trace was cut off or device work is missing", group=RARE
    )
    allow_missing_ranks: bool = _flag(False, "continue if traces of some ranks are missing", group=RARE)
    allow_mixed: bool = _flag(
        False, "continue if a damaged trace mixes records of several processes", group=RARE
    )
    min_records: int = _flag(
        DEFAULT_LIMITS.min_records, "reject a damaged trace with fewer intact nodes or events", group=RARE
    )
    max_bytes: int = _flag(8 << 30, "reject a larger trace (uncompressed size)", group=RARE)
    max_ratio: int = _flag(
        DEFAULT_LIMITS.max_ratio, "reject a gzip file that expands by more than this factor", group=RARE
    )
    timeout: float = _flag(0.0, "seconds per rank; 0: no limit", group=RARE, metavar="SECONDS")

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise ValueError(f"--workers must be 0 (one per core) or more, not {self.workers}")
        if not self.timeout >= 0:
            raise ValueError(f"--timeout must be 0 (no limit) or more seconds, not {self.timeout}")
        if not CLUSTERS.fullmatch(self.cluster):
            raise ValueError(f"--cluster must be local, slurm or tcp://HOST:PORT, not {self.cluster!r}")
        if self.step != "all" and not (self.step.isascii() and self.step.isdigit()):
            raise ValueError(f"--step must be the number of a ProfilerStep or all, not {self.step!r}")
        if bool(self.host) != bool(self.device):
            raise ValueError("--host and --device need each other: they name the two traces of one rank")
        if self.host and self.files:
            raise ValueError("give either trace files, or --host and --device")
        if not all((*self.files, self.dir)):
            raise ValueError("the name of a file or folder is empty: check the variable that it comes from")
        if self.files and self.dir != FOLDER:
            raise ValueError(f"give either files or one folder, or --dir {self.dir}")
        if not 0 <= self.max_overhead <= 100:
            raise ValueError(f"--max-overhead must be between 0 and 100 percent, not {self.max_overhead}")
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
        """The options for converting one rank."""
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
        """The runs that the flags name. Raises ``TraceError`` if the files or folders hold no traces."""
        output = Path(self.output) if self.output else None
        if output:
            output.mkdir(parents=True, exist_ok=True)
        sets = self._named_sets(output)
        ranks = sorted({rank for traces in sets for rank in (*traces.pairs, *traces.incomplete)})
        # A share I/N of the ranks may be empty, as with more tasks than ranks.
        if "/" not in self.ranks and not any(map(trace_sets.rank_choice(self.ranks), ranks)):
            raise TraceError(
                f"--ranks {self.ranks}: there is nothing to convert, as the traces are of ranks "
                f"{list_ranks(ranks)}."
            )
        return sets

    def _named_sets(self, output: Path | None) -> list[trace_sets.TraceSet]:
        if self.host:
            return [trace_sets.of_pair(Path(self.host), Path(self.device), output)]
        paths = [Path(name) for name in self.files]
        if len(paths) == 1 and paths[0].is_dir() or not paths:
            return trace_sets.find(paths[0] if paths else Path(self.dir), self.name, output)
        return trace_sets.of_files(paths, output)

    def run_options(self, keep: bool) -> RunOptions:
        """The options for converting runs. ``keep``: keep valid files of an earlier conversion."""
        return RunOptions(
            self.engine,
            self.workers or default_workers(),
            self.timeout,
            self.keep_merged,
            self.allow_missing_ranks,
            trace_sets.rank_choice(self.ranks) if self.ranks else None,
            keep,
            self.skeletons,
            self.cluster,
        )
