"""DeepSpeed's pipeline schedule: forwards and backwards alternate, messages one at a time.

Every stage alternates between a forward and a backward. Before a forward it sends the last gradient and
receives an activation, before a backward it receives a gradient and sends the last activation, in this order
(``deepspeed/runtime/pipe/schedule.py``, TrainSchedule). A sender goes on once the transport has taken the
message over, a receiver waits for all of it. What is larger than the transport's buffer starts only when its
receiver waits for it.
"""

from __future__ import annotations

from collections import defaultdict, deque
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
    programs = [deque(_program(stage, stages, micro_batches)) for stage in range(stages)]
    clock = [0.0] * stages
    posted: dict[tuple[bool, int, int], float] = {}
    arrived: dict[tuple[bool, int, int], float] = {}
    free: defaultdict[tuple[bool, int], float] = defaultdict(float)
    while any(programs):
        for stage, program in enumerate(programs):
            while program:
                what, j = program[0]
                up = what in (SEND_ACTIVATION, RECEIVE_ACTIVATION)
                boundary = stage if what in (SEND_ACTIVATION, RECEIVE_GRADIENT) else stage - 1
                message = up, boundary, j
                if what in (FORWARD, BACKWARD):
                    clock[stage] += (forward if what == FORWARD else backward)[stage]
                elif what in (SEND_ACTIVATION, SEND_GRADIENT):
                    begin = max(clock[stage], free[up, boundary])
                    if holds[boundary]:
                        if message not in posted:
                            break
                        begin = max(begin, posted[message])
                    arrived[message] = free[up, boundary] = begin + messages[boundary]
                    clock[stage] = begin + holds[boundary]
                else:
                    posted[message] = clock[stage]
                    if message not in arrived:
                        break
                    clock[stage] = max(clock[stage], arrived[message])
                program.popleft()
    return clock


def _program(stage: int, stages: int, micro_batches: int) -> list[tuple[int, int]]:
    """(what, micro-batch) in the order in which a stage does it."""
    program: list[tuple[int, int]] = []
    first, last = stage == 0, stage == stages - 1
    known, previous = range(micro_batches), -1
    for step in range(2 * (micro_batches + stages - 1)):
        is_forward = step % 2 == stage % 2
        j = (step - stage) // 2 if is_forward else (step + stage + 1) // 2 - stages
        parts = [
            (SEND_GRADIENT, previous, is_forward and not first),
            (RECEIVE_ACTIVATION, j, is_forward and not first),
            (RECEIVE_GRADIENT, j, not is_forward and not last),
            (SEND_ACTIVATION, previous, not is_forward and not last),
            (FORWARD if is_forward else BACKWARD, j, True),
        ]
        program += [(what, number) for what, number, here in parts if here and number in known]
        previous = j
    # After the last backward its gradient goes out.
    if not first and (SEND_GRADIENT, micro_batches - 1) not in program:
        program.append((SEND_GRADIENT, micro_batches - 1))
    return program
