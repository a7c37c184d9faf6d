"""Megatron-LM's interleaved schedule: every stage holds several chunks of layers.

Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
section 2.2. Messages are sent beside computation; those from one stage to another follow each other over
the link between them.
"""

from __future__ import annotations

import functools

from fasop.errors import PlanError
from fasop.schedule.one_f_one_b import Task


def check(stages: int, micro_batches: int, chunks: int, layers: tuple[int, ...]) -> None:
    """Raises ``PlanError`` where ``layers`` of each stage can't run in so many chunks."""
    if chunks < 2 or stages < 2:
        raise PlanError(
            f"--virtual-stages {chunks} on {stages} pipeline stages: interleaving needs at least 2 of both."
        )
    if micro_batches % stages:
        raise PlanError(
            f"{micro_batches} micro-batches on {stages} pipeline stages: an interleaved schedule needs a "
            f"multiple of {stages}; plan with another micro-batch or global batch."
        )
    if min(layers) < chunks:
        raise PlanError(f"--virtual-stages {chunks}: a stage has {min(layers)} layers; give at most as many.")


def chunk_layers(layers: int, chunks: int) -> tuple[int, ...]:
    """Layers of each chunk of a stage, as even as whole layers allow."""
    return tuple(layers // chunks + (chunk < layers % chunks) for chunk in range(chunks))


def in_flight(stage: int, stages: int, micro_batches: int, chunks: int) -> int:
    """Most chunks whose activations a stage keeps at once."""
    return min(_warm_up(stage, stages, chunks) + 1, micro_batches * chunks)


def run(
    forward: list[list[float]], backward: list[list[float]], links: list[float], micro_batches: int
) -> list[float]:
    """When each of ``tasks`` ends, in seconds.

    forward, backward: seconds [stage][chunk] per micro-batch; links: per message from each stage to the next,
    the last one's to the first.
    """
    stages, chunks = len(forward), len(forward[0])
    ends: list[float] = []
    for task in tasks(stages, micro_batches, chunks):
        if task.is_message:
            # Gradients go over the link of the stage that they come to.
            seconds = links[task.stage if task.is_forward else task.peer]
        else:
            seconds = (forward if task.is_forward else backward)[task.stage][task.chunk]
        ends.append(max((ends[wait] for wait in task.waits), default=0.0) + seconds)
    return ends


@functools.lru_cache(maxsize=16)
def tasks(stages: int, m: int, chunks: int) -> list[Task]:
    """All tasks of a step, each after all that it waits for."""
    programs = [_program(stage, stages, m, chunks) for stage in range(stages)]
    found: list[Task] = []
    at = [0] * stages
    last: dict[int | tuple[int, int], int] = {}  # the last task of each stage, and over each link
    came: dict[tuple[int, bool, int, int], int] = {}  # the message with a computation's input
    while any(at[stage] < len(programs[stage]) for stage in range(stages)):
        before = list(at)
        for stage in range(stages):
            while at[stage] < len(programs[stage]):
                is_forward, chunk, j = programs[stage][at[stage]]
                here = (stage, is_forward, chunk, j)
                # The first computation of all, and the first to go back, wait for no message.
                source = (0, 0) if is_forward else (stages - 1, chunks - 1)
                if here not in came and (stage, chunk) != source:
                    break
                waits = tuple(known for known in (last.get(stage), came.get(here)) if known is not None)
                last[stage] = len(found)
                found.append(Task(stage, -1, j, is_forward, waits, chunk))
                at[stage] += 1
                # The output goes to the next stage, or to the next chunk on the first one.
                onward, peer = divmod(chunk * stages + stage + (1 if is_forward else -1), stages)
                if 0 <= onward < chunks:
                    link = last.get((stage, peer))
                    waits = (len(found) - 1, *(() if link is None else (link,)))
                    last[stage, peer] = came[peer, is_forward, onward, j] = len(found)
                    found.append(Task(stage, peer, j, is_forward, waits, chunk))
        assert at != before, "the schedule waits for itself"
    return found


def _warm_up(stage: int, stages: int, chunks: int) -> int:
    return (stages - stage - 1) * 2 + (chunks - 1) * stages


def _program(stage: int, stages: int, m: int, chunks: int) -> list[tuple[bool, int, int]]:
    """(is forward, chunk, micro-batch) in the order in which a stage computes them."""
    total = m * chunks
    warm = min(_warm_up(stage, stages, chunks), total)

    def forward(k: int) -> tuple[bool, int, int]:
        return True, k % (stages * chunks) // stages, k // (stages * chunks) * stages + k % stages

    def backward(k: int) -> tuple[bool, int, int]:
        _, chunk, j = forward(k)
        return False, chunks - 1 - chunk, j

    order = [forward(k) for k in range(warm)]
    for k in range(total - warm):
        order += [forward(warm + k), backward(k)]
    return order + [backward(k) for k in range(total - warm, total)]
