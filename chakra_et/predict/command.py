"""``chakra-et predict NAME``: the step time of a run under changed conditions.

    chakra-et predict traces/gpt2 --scale 'aten::mm|gemm'=0.5
    chakra-et predict traces/gpt2 --bandwidth 100Gbit/s --latency 5us
    chakra-et predict traces/gpt2 --rank 3 --output predicted/gpt2

Exit status: 0; 2 for arguments or files that can't be used.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from chakra_et import text
from chakra_et.cli import allow_missing_ranks, parse, skeletons
from chakra_et.errors import TraceError
from chakra_et.et.sets import Skeletons
from chakra_et.predict.predict import (
    Prediction,
    RankPrediction,
    check_output,
    describe,
    predict,
    write_prediction,
)
from chakra_et.simulate.run import Run, load_run, together
from chakra_et.text import plural
from chakra_et.transform.changes import Change, Rebuild

if TYPE_CHECKING:
    from chakra_et.cost.network_fit import NetworkModel
    from chakra_et.transform.scale import Scaling

_MOST_RANKS = 1024


def _option(help: str, default: Any = None, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": help, **metadata})


@dataclass
class PredictConfig:
    """The command's arguments."""

    name: str = _option("NAME of a run (NAME.0.et, NAME.1.et, …) or an .et file", "", positional=True)
    scale: tuple[str, ...] = _option(
        "nodes whose name matches take FACTOR times as long", (), metavar="PATTERN=FACTOR"
    )
    gpu_kernels: float | None = _option(
        "all kernels and copies of devices take FACTOR times as long, and no call of the host",
        metavar="FACTOR",
    )
    rank: int | None = _option("a rank that computes like the median of the others")
    gpu: str | None = _option(
        "kernels as they would be on another GPU: H100→MI300X or H100:MI300X; or a file of measure-gpu",
        metavar="FROM:TO",
    )
    resize: tuple[str, ...] = _option(
        "dimensions of tensors: 10=20 720=1440 for twice a batch of 10", (), metavar="OLD=NEW"
    )
    layers: str = _option("repeated blocks of the model: a number, or a factor as 2x", "")
    batch: str = _option("sequences of a rank in one pass: a number, or 2x", "")
    seq: str = _option("tokens of a sequence: a number, or 2x", "")
    dp: int | None = _option(
        "data-parallel ranks in place of the measured ones", short="--ranks", group="distribution"
    )
    tp: int | None = _option("tensor-parallel ranks: a multiple of the measured ones", group="distribution")
    pp: int | None = _option("pipeline stages: a multiple of the measured ones", group="distribution")
    mesh: str = _option(
        "the measured mesh (tp2,dp4,pp2), where the groups don't show it", "", group="distribution"
    )
    bucket_mb: float | None = _option(
        "DDP's bucket_cap_mb: gradients are all-reduced in buckets of as many MiB", group="distribution"
    )
    accumulate: int | None = _option(
        "forward and backward passes for each step of the optimizer", group="distribution"
    )
    shard: Literal["fsdp2"] | None = _option(
        "fsdp2: a run of DDP as fully_shard on each repeated block would run", group="distribution"
    )
    bandwidth: str | None = _option(
        "of each rank's link per direction, with its unit: 100Gbit/s; or that of the run and the new one: "
        "1Gbit/s:10Gbit/s",
        group="network",
    )
    latency: str | None = _option("of one message, with its unit: 5us", group="network")
    topology: str | None = _option(
        "in place of bandwidth and latency: '8xH100 NVLink, 4 nodes, 400 Gbit/s'", group="network"
    )
    network: str | None = _option(
        "of the run, in place of a fit to it: 10Gbit/s,30us or a file of chakra-et measure-network",
        group="network",
    )
    contention: bool = _option("transfers at the same time share their links", True, group="network")
    overlap: bool = _option("communication delays only the end of its step", False)
    starts: Literal["recorded", "together"] = _option(
        "together: all ranks begin at the same moment, in place of when their recordings began", "recorded"
    )
    output: str | None = _option("write the predicted run as OUTPUT.RANK.et", short="-o")
    comm_groups: str | None = _option("JSON file of group id → ranks, in place of NAME_comm_groups.json")
    allow_missing_ranks: bool = allow_missing_ranks()
    skeletons: Skeletons = skeletons()
    json: bool = _option("print JSON", False)

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("name the run to predict before the flags: predict NAME --scale …")
        if self.gpu_kernels is not None and not 0 <= self.gpu_kernels < math.inf:
            raise ValueError(f"--gpu-kernels {self.gpu_kernels:g}: use a factor from 0 on")
        _what_ifs(self, None, alone=False)
        for name in ("dp", "tp", "pp"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= _MOST_RANKS:
                raise ValueError(f"--{name} {value}: use 1 to {_MOST_RANKS:,}")
        if self.accumulate is not None and not 2 <= self.accumulate <= _MOST_RANKS:
            raise ValueError(f"--accumulate {self.accumulate}: use 2 to {_MOST_RANKS:,} passes")
        if self.bucket_mb is not None and not 0 < self.bucket_mb < math.inf:
            raise ValueError(f"--bucket-mb {self.bucket_mb:g}: use a size above 0")
        if self.shard and (self.bucket_mb is not None or self.accumulate):
            other = "--accumulate" if self.accumulate else "--bucket-mb"
            raise ValueError(f"{other} changes what DDP does: leave it out, or --shard {self.shard}")
        if self.topology and (self.bandwidth or self.latency):
            raise ValueError(
                "--topology has bandwidth and latency of its own: give it or --bandwidth/--latency"
            )
        if self.output is not None and not Path(self.output).name:
            raise ValueError(f"--output {self.output!r} must end in the NAME of the files to write")

    def scaling(self, network: NetworkModel | None) -> Scaling | None:
        """What ``chakra-et scale`` makes too; None where nothing of it is asked for."""
        if not any((self.layers, self.batch, self.seq, self.resize, self.dp, self.tp, self.pp)):
            return None
        from chakra_et.transform.scale import Scaling
        from chakra_et.transform.tensors import parse_sizes

        names = ("dp", "tp", "pp", "layers", "batch", "seq", "mesh", "bucket_mb")
        known = {name: getattr(self, name) for name in names}
        return Scaling(spread=0.0, network=network, resize=parse_sizes(self.resize), **known)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    config = parse(
        PredictConfig,
        argv,
        description="Predict the step time of a run under changed conditions. Give NAME before the flags.",
    )
    if config.output:
        check_output(config.output)
    run = load_run(config.name, config.comm_groups, config.allow_missing_ranks, config.skeletons)
    run = together(run) if config.starts == "together" else run
    prediction = predict(run, changes(config, run))
    written = write_prediction(prediction, config.output) if config.output else []
    if config.json:
        print(json.dumps(as_json(prediction, [str(path) for path in written]), indent=2))
        return 0
    print("\n".join(lines(prediction)))
    for path in written:
        print(f"wrote {path}")
    return 0


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
    elif model and not any((config.scaling(model), config.bucket_mb, config.shard)):
        raise TraceError("--network describes the present network: add what changes, such as --bandwidth")
    return found


def _what_ifs(config: PredictConfig, model: NetworkModel | None, alone: bool) -> list[Change | Rebuild]:
    """All what-ifs but the network, those that change nodes or their sizes first; ``alone``: the run has one
    rank. Each is imported where it is asked for, so that a prediction loads little."""
    found: list[Change | Rebuild] = []
    if scaling := config.scaling(model):
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
        from chakra_et.predict.gpu import parse_gpu

        found.append(parse_gpu(config.gpu))
    if config.scale or config.gpu_kernels is not None or config.rank is not None or config.overlap:
        from chakra_et.transform import durations

        found += [durations.parse_scale(each) for each in config.scale]
        found += [] if config.gpu_kernels is None else [durations.GpuKernels(config.gpu_kernels)]
        found += [] if config.rank is None else [durations.RankAs(config.rank)]
        found += [durations.Overlap()] if config.overlap else []
    return found


def lines(prediction: Prediction) -> list[str]:
    """The prediction as text."""
    rows = [
        ("rank", "measured ms", "replayed ms", "predicted ms", "±", "change", "bound before", "bound after")
    ]
    for rank in prediction.ranks:
        change = f"{100 * (rank.after_ns / rank.before_ns - 1):+.1f}%" if rank.before_ns else "-"
        rows.append(
            (
                str(rank.rank),
                "-" if rank.measured_ns is None else f"{rank.measured_ns / 1e6:,.3f}",
                f"{rank.before_ms:,.3f}",
                f"{rank.after_ms:,.3f}",
                f"{rank.uncertainty_ms:,.3f}" if rank.scatter_is_known else "–",
                change,
                describe(rank.bound_before),
                describe(rank.bound_after),
            )
        )
    steps = len(prediction.ranks[0].steps)
    return [
        f"{prediction.run.name}: step time per rank, mean of {plural(steps, 'step')}; ± is one standard "
        "deviation",
        *text.table(rows, right=range(6)),
        *(f"note: {note}" for note in [*_about_steps(prediction.ranks), *prediction.notes]),
    ]


def _about_steps(ranks: Sequence[RankPrediction]) -> list[str]:
    """Where the figures of the table say less than they seem to."""
    if all(rank.scatter_is_known for rank in ranks):
        return []
    models = max(rank.uncertainty_ms for rank in ranks)
    shown = any(rank.uncertainty_ns > 0.01 * rank.after_ns for rank in ranks)
    known = f"; what else is in doubt makes it {models:,.3f} ms or more" if shown else ""
    return [f"± isn't known: how much steps differ takes two measured steps or more{known}"]


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
