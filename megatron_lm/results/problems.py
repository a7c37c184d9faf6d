"""What is wrong with a run, the worst first, one sentence each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from megatron_lm.diagnosis import of_run, training
from megatron_lm.diagnosis.failures import Failure
from megatron_lm.logs import gpus, records, runs, state
from megatron_lm.logs.runs import Node, Run
from megatron_lm.logs.state import State
from megatron_lm.results import speed

TAIL_BYTES = 20_000
IDLE_MB = 1024  # a GPU in use holds more than this: a CUDA context and weights
UNCOMPARED = ("NODE_RANK", "MASTER_ADDR", "PRECISION")  # the last one is as used, not as asked for


def found(
    run: Run, states: Mapping[str, State], outputs: Mapping[Node, bytes], failure: Failure | None
) -> list[str]:
    """The problems as ``WRONG: …`` or ``WARNING: …``; ``outputs``: of each node."""
    sure = [f"WRONG: {text}" for text in _wrong(run, states, outputs, failure)]
    unsure = training.divergence(speed.iterations(outputs.values()))
    return [*sure, f"WARNING: {unsure}"] if unsure else sure


def _wrong(
    run: Run, states: Mapping[str, State], outputs: Mapping[Node, bytes], failure: Failure | None
) -> Iterator[str]:
    for job, known in states.items():
        if known.word != state.COMPLETED and known.word not in state.ALIVE:
            yield f"job {job} is not running: {known}"
    if sentence := training.not_finite(outputs.values()):
        yield with_nodes(run, sentence)
    if any(known.word == state.RUNNING for known in states.values()):
        interval = next((records.settings(data).get("LOG_INTERVAL", "1") for data in outputs.values()), "1")
        if sentence := training.stall(run, speed.iterations(outputs.values()), int(interval)):
            yield with_nodes(run, sentence)
        for node in run.nodes:
            last = last_gpus(node.read("gpu"))
            if last and not any(gpu.processes or (gpu.used or 0) > IDLE_MB for gpu in last):
                yield f"no process uses the GPUs of {node.name}"
    if failure is not None:
        yield str(failure)
    if lost := ",".join(of_run.lost_nodes(run, states)):
        resume = f"megatron_lm/_03_submit.sh --resume {run.jobs[0]} --without {lost}"
        yield f"lost: {lost}; continue on the other nodes with {resume}"
    submitted = runs.submitted(run)
    for node, data in outputs.items():
        for name, value in records.settings(data).items():
            if name not in UNCOMPARED and value != submitted.get(name, value):
                yield f"{name} is {value!r} on {node.name}, the run was submitted with {submitted[name]!r}"


def with_nodes(run: Run, sentence: str) -> str:
    """A sentence with the node of each rank that it names."""
    logs = map(of_run.log_of, run.nodes)
    firsts = sorted((log.first_rank, log.node) for log in logs if log.first_rank is not None)

    def placed(match: re.Match[str]) -> str:
        on = [name for first, name in firsts if first <= int(match[1])]
        return f"{match[0]} on {on[-1]}" if on else match[0]

    return re.sub(r"\brank (\d+)", placed, sentence)


def last_gpus(data: bytes) -> list[gpus.Gpu]:
    """The last sample of a GPU log; empty if it has none."""
    samples = gpus.samples(data[-TAIL_BYTES:])
    return samples[max(samples)] if samples else []
