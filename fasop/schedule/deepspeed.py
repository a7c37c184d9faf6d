"""DeepSpeed's pipeline schedule: forwards and backwards alternate, messages one at a time.

Every stage alternates between a forward and a backward. Before a forward it sends the last gradient and
receives an activation, before a backward it receives a gradient and sends the last activation, in this order
(``deepspeed/runtime/pipe/schedule.py``, TrainSchedule). A sender goes on once the transport has taken the
message over, a receiver waits for all of it. What is larger than the transport's buffer starts only when its
receiver waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence

SEND_GRADIENT, RECEIVE_ACTIVATION, RECEIVE_GRADIENT, SEND_ACTIVATION, FORWARD, BACKWARD = range(6)


def stage_ends(
    forward: Sequence[float],
    backward: Sequence[float],
    messages: Sequence[float],
    holds: Sequence[float],
    micro_batches: int,
) -> list[float]:
    """When each stage has computed and sent all, in seconds.

    forward, backward: seconds of each stage per micro-batch; messages: seconds of a message over each
    boundary, of which it holds its sender for the first ``holds``.
    """
    stages = len(forward)
    programs = [_program(stage, stages, micro_batches) for stage in range(stages)]
    clock, at = [0.0] * stages, [0] * stages
    posted: dict[tuple[bool, int, int], float] = {}
    arrived: dict[tuple[bool, int, int], float] = {}
    free = {(up, boundary): 0.0 for up in (False, True) for boundary in range(stages - 1)}
    while any(at[stage] < len(programs[stage]) for stage in range(stages)):
        for stage in range(stages):
            while at[stage] < len(programs[stage]):
                what, j = programs[stage][at[stage]]
                if what == FORWARD:
                    clock[stage] += forward[stage]
                elif what == BACKWARD:
                    clock[stage] += backward[stage]
                else:
                    up = what in (SEND_ACTIVATION, RECEIVE_ACTIVATION)
                    boundary = stage if what in (SEND_ACTIVATION, RECEIVE_GRADIENT) else stage - 1
                    if what in (SEND_ACTIVATION, SEND_GRADIENT):
                        begin = max(clock[stage], free[up, boundary])
                        if holds[boundary]:
                            if (up, boundary, j) not in posted:
                                break
                            begin = max(begin, posted[up, boundary, j])
                        arrived[up, boundary, j] = free[up, boundary] = begin + messages[boundary]
                        clock[stage] = begin + holds[boundary]
                    else:
                        posted[up, boundary, j] = clock[stage]
                        if (up, boundary, j) not in arrived:
                            break
                        clock[stage] = max(clock[stage], arrived[up, boundary, j])
                at[stage] += 1
    return clock


def _program(stage: int, stages: int, micro_batches: int) -> list[tuple[int, int]]:
    """(what, micro-batch) in the order in which a stage does it."""
    program: list[tuple[int, int]] = []
    first, last = stage == 0, stage == stages - 1
    previous = -1

    def is_one(j: int) -> bool:
        return 0 <= j < micro_batches

    for step in range(2 * (micro_batches + stages - 1)):
        is_forward = step % 2 == stage % 2
        if is_forward:
            j = (step - stage) // 2
            if is_one(previous) and not first:
                program.append((SEND_GRADIENT, previous))
            if is_one(j) and not first:
                program.append((RECEIVE_ACTIVATION, j))
        else:
            j = (step + stage + 1) // 2 - stages
            if is_one(j) and not last:
                program.append((RECEIVE_GRADIENT, j))
            if is_one(previous) and not last:
                program.append((SEND_ACTIVATION, previous))
        if is_one(j):
            program.append((FORWARD if is_forward else BACKWARD, j))
        previous = j
    # After the last backward its gradient goes out.
    if not first and (SEND_GRADIENT, micro_batches - 1) not in program:
        program.append((SEND_GRADIENT, micro_batches - 1))
    return program
