"""``chakra-et predict NAME``: the step time of a run under changed conditions.

chakra-et predict traces/gpt2 --scale 'aten::mm|gemm'=0.5
chakra-et predict traces/gpt2 --bandwidth 100Gbit/s --latency 5us
chakra-et predict traces/gpt2 --rank 3 --output predicted/gpt2
chakra-et predict traces/gpt2 --sweep dp=8,16,32 bandwidth=100Gbit/s,400Gbit/s --cluster slurm
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from chakra_et import text
from chakra_et.cli import allow_missing_ranks, cluster, option, parse, run_names, skeletons
from chakra_et.convert.inputs import load_run
from chakra_et.errors import TraceError
from chakra_et.et.record import refuse_existing
from chakra_et.et.sets import Skeletons
from chakra_et.names import run_at
from chakra_et.predict.predict import (
    Prediction,
    RankPrediction,
    describe,
    figures,
    predict,
    predicted_traces,
    write_traces,
)
from chakra_et.simulate.run import Run, together
from chakra_et.text import plural
from chakra_et.transform.changes import Change, Rebuild
from chakra_et.transform.flags import SizeFlags

if TYPE_CHECKING:
    from chakra_et.cost.network_fit import NetworkModel


@dataclass
class PredictConfig(SizeFlags):
    MOST: ClassVar[int] = 1024

    name: str = run_names(default="")
    scale: tuple[str, ...] = option(
        "nodes whose name has the regular expression PATTERN in it take FACTOR times as long",
        (),
        metavar="PATTERN=FACTOR",
    )
    gpu_kernels: float | None = option(
        "all device kernels and copies take FACTOR times as long",
        None,
        metavar="FACTOR",
        least=0,
    )
    rank: str | None = option("ranks that compute like the median of the others: 3, or 3,4,5", None)
    gpu: str | None = option(
        "kernels as they would be on another GPU: H100→MI300X or H100:MI300X; or a file of measure-gpu",
        None,
        metavar="FROM:TO",
    )
    bucket_mb: float | None = option(
        "DDP's bucket_cap_mb, the size of gradient buckets in MiB", None, group="distribution", above=0
    )
    accumulate: int | None = option(
        "forward and backward passes per optimizer step", None, group="distribution", least=2, most=1024
    )
    shard: Literal["fsdp2"] | None = option(
        "fsdp2: fully_shard on each repeated block in place of DDP", None, group="distribution"
    )
    bandwidth: str | None = option(
        "of each rank's link per direction, with its unit: 100Gbit/s; or the run's and the new one: "
        "1Gbit/s:10Gbit/s",
        None,
        group="network",
    )
    latency: str | None = option("of a message, with its unit: 5us", None, group="network")
    topology: str | None = option(
        "in place of bandwidth and latency: '8xH100 NVLink, 4 nodes, 400 Gbit/s'", None, group="network"
    )
    contention: bool = option("concurrent transfers share their links", True, group="network")
    overlap: bool = option("computation waits for communication only at the end of the step", False)
    starts: Literal["recorded", "together"] = option(
        "together: all ranks start at the same time, without the skew of their recordings", "recorded"
    )
    sweep: tuple[str, ...] = option(
        "predict each combination of these values: dp=8,16 bandwidth=100Gbit/s,400Gbit/s",
        (),
        metavar="FLAG=VALUES",
    )
    cluster: str = cluster("each combination of --sweep")
    output: str | None = option("write the predicted run as OUTPUT.RANK.et", None, short="-o")
    allow_missing_ranks: bool = allow_missing_ranks()
    skeletons: Skeletons = skeletons()
    json: bool = option("print JSON", False)

    def __post_init__(self) -> None:
        for flag in () if self.name else ("scale", "resize", "sweep"):
            # A flag with several values also takes the NAME behind them.
            *values, last = getattr(self, flag) or ("=",)
            if "=" not in last:
                self.name = last
                setattr(self, flag, tuple(values))
        if not self.name:
            raise ValueError("name the run to predict: predict NAME --scale …")
        super().__post_init__()
        _what_ifs(self, None, alone=False)
        if self.shard and (self.bucket_mb is not None or self.accumulate):
            other = "--accumulate" if self.accumulate else "--bucket-mb"
            raise ValueError(f"{other} changes what DDP does: leave it out, or --shard {self.shard}")
        if self.topology and (self.bandwidth or self.latency):
            raise ValueError("--topology has its own bandwidth and latency: leave the flags of these out")
        if self.output is not None and not Path(self.output).name:
            raise ValueError(f"--output {self.output!r} must end in the NAME of the files to write")


def main(argv: Sequence[str] | None = None) -> int:
    config = parse(PredictConfig, argv, description="Predict step times under changed conditions.")
    if config.output:
        refuse_existing(run_at(config.output))
    if config.sweep:
        from chakra_et.predict import sweep

        rows = sweep.sweep(config, _alone)
        print(json.dumps(rows, indent=2) if config.json else "\n".join(sweep.lines(rows)))
        return 2 if all("error" in row for row in rows) else 0
    if config.cluster:
        raise TraceError("--cluster is for --sweep: one prediction is one process")
    prediction = predicted(config)
    written: list[Path] = []
    if config.output:
        written = write_traces(predicted_traces(prediction), prediction.changed, config.output)
    if config.json:
        print(json.dumps(as_json(prediction, [str(path) for path in written]), indent=2))
        return 0
    print("\n".join(lines(prediction)))
    for path in written:
        print(f"wrote {path}")
    return 0


def predicted(config: PredictConfig) -> Prediction:
    """The prediction that a command line asks for. Raises ``TraceError``."""
    run = load_run(config.name, config.allow_missing_ranks, config.skeletons)
    run = together(run) if config.starts == "together" else run
    return predict(run, changes(config, run))


def _alone(config: PredictConfig) -> dict[str, Any]:
    return as_json(predicted(config), [])


def changes(config: PredictConfig, run: Run) -> list[Change | Rebuild]:
    """The what-ifs of a command line. Raises ``TraceError`` for a figure without a unit."""
    model = None
    if config.network:
        from chakra_et.transform.network import read_network

        model = read_network(config.network)
    found = _what_ifs(config, model, len(run.graph.ranks) == 1)
    if any((config.bandwidth, config.latency, config.topology)):
        from chakra_et.cost.units import parse_bandwidth, parse_latency
        from chakra_et.transform.network import Network

        rates = [parse_bandwidth(each) for each in (config.bandwidth or "").split(":") if config.bandwidth]
        if len(rates) > 2:
            raise TraceError(f"--bandwidth {config.bandwidth!r}: give the new one, or FROM:TO")
        network = Network(
            rates[-1] if rates else None,
            parse_latency(config.latency) if config.latency else None,
            config.topology or "",
            model,
            config.contention,
            rates[0] if len(rates) == 2 else None,
        )
        found.append(network)
    elif model and not any((config.sizes(), config.bucket_mb, config.shard)):
        raise TraceError("--network describes the present network: add what changes, such as --bandwidth")
    return found


def _what_ifs(config: PredictConfig, model: NetworkModel | None, alone: bool) -> list[Change | Rebuild]:
    """All what-ifs but the network, those that change nodes or their sizes first; ``alone``: the run has one
    rank. Each is imported where it is asked for, so that a prediction loads little."""
    found: list[Change | Rebuild] = []
    if scaling := config.scaling(model, spread=0.0):
        found.append(scaling)
    if config.bucket_mb and not (config.dp and alone):
        from chakra_et.transform.ddp import BucketSize

        found.append(BucketSize(config.bucket_mb, model=model))
    if config.shard:
        from chakra_et.transform.fsdp import Shard

        found.append(Shard(model))
    if config.accumulate:
        from chakra_et.transform.accumulation import Accumulate

        found.append(Accumulate(config.accumulate))
    if config.gpu:
        from chakra_et.transform.gpu import parse_gpu

        found.append(parse_gpu(config.gpu))
    if config.scale or config.gpu_kernels is not None or config.rank is not None or config.overlap:
        from chakra_et.transform import durations

        found += [durations.parse_scale(each) for each in config.scale]
        found += [] if config.gpu_kernels is None else [durations.GpuKernels(config.gpu_kernels)]
        found += [] if config.rank is None else durations.parse_ranks(str(config.rank))
        found += [durations.Overlap()] if config.overlap else []
    return found


def lines(prediction: Prediction) -> list[str]:
    """The prediction as text: a table with a row for each rank, and what was assumed."""
    rows = [
        ("rank", "measured ms", "replayed ms", "predicted ms", "±", "change", "bound before", "bound after")
    ]
    for rank in prediction.ranks:
        measured = "-" if rank.measured_ns is None else f"{rank.measured_ns / 1e6:,.3f}"
        found = figures(rank.before_ms, rank.after_ms, rank.uncertainty_ms if rank.scatter_is_known else None)
        bound = describe(rank.bound_before), describe(rank.bound_after)
        rows.append((str(rank.rank), measured, *found, *bound))
    steps = len(prediction.ranks[0].steps)
    return [
        f"{prediction.run.name}: step time of each rank, mean of {plural(steps, 'step')}; ± is one standard "
        "deviation",
        *text.table(rows, right=range(6)),
        *(f"note: {note}" for note in [*_about_steps(prediction.ranks), *prediction.notes]),
    ]


def _about_steps(ranks: Sequence[RankPrediction]) -> list[str]:
    """Where the figures of the table say less than they seem to."""
    if all(rank.scatter_is_known for rank in ranks):
        return []
    models = max(rank.uncertainty_ms for rank in ranks)
    least = f": at least {models:,.3f} ms" if models else ""
    return [f"± isn't known, as one step doesn't show how much steps differ{least}"]


def as_json(prediction: Prediction, written: list[str]) -> dict[str, Any]:
    """The prediction as JSON values; times in µs, shares from 0 to 1. Of several steps: the mean."""
    return {
        "name": prediction.run.name,
        "step_us": {"before": prediction.before_ms * 1e3, "after": prediction.after_ms * 1e3},
        "ranks": [
            {
                "rank": rank.rank,
                "measured_us": None if rank.measured_ns is None else rank.measured_ns / 1e3,
                "before_us": rank.before_ns / 1e3,
                "after_us": rank.after_ns / 1e3,
                "median_before_us": rank.median_ns("before_ns") / 1e3,
                "median_after_us": rank.median_ns("after_ns") / 1e3,
                "uncertainty_us": rank.uncertainty_ns / 1e3 if rank.scatter_is_known else None,
                "bound_before": rank.bound_before,
                "bound_after": rank.bound_after,
                "steps": [
                    {
                        "name": step.name,
                        "measured_us": None if step.measured_ns is None else step.measured_ns / 1e3,
                        "before_us": step.before_ns / 1e3,
                        "after_us": step.after_ns / 1e3,
                    }
                    for step in rank.steps
                ],
            }
            for rank in prediction.ranks
        ],
        "notes": [*_about_steps(prediction.ranks), *prediction.notes],
        "written": written,
    }
