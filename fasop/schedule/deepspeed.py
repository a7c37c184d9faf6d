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

COMPUTE, SEND, RECEIVE = range(3)
Work = tuple[bool, int, int]
"""Whether of activations, else of gradients; the stage, or the boundary after a stage; the micro-batch."""


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
    posted: dict[Work, float] = {}
    arrived: dict[Work, float] = {}
    free: defaultdict[tuple[bool, int], float] = defaultdict(float)
    while any(programs):
        for stage, program in enumerate(programs):
            while program:
                what, message = program[0]
                up, boundary, _ = message
                if what == COMPUTE:
                    clock[stage] += (forward if up else backward)[stage]
                elif what == SEND:
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


def _program(stage: int, stages: int, micro_batches: int) -> list[tuple[int, Work]]:
    """What a stage does, in order."""
    program: list[tuple[int, Work]] = []
    known, previous = range(micro_batches), -1
    for step in range(2 * (micro_batches + stages - 1)):
        if step % 2 == stage % 2:
            j = (step - stage) // 2
            around = (SEND, (False, stage - 1, previous)), (RECEIVE, (True, stage - 1, j))
        else:
            j = (step + stage + 1) // 2 - stages
            around = (RECEIVE, (False, stage, j)), (SEND, (True, stage, previous))
        program += [each for each in around if each[1][2] in known and 0 <= each[1][1] < stages - 1]
        program += [(COMPUTE, (step % 2 == stage % 2, stage, j))] if j in known else []
        previous = j
    # After the last backward its gradient goes out.
    last = SEND, (False, stage - 1, micro_batches - 1)
    return program + ([last] if stage and last not in program else [])
