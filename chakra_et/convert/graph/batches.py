"""Sends and receives on a device: the messages of each kernel.

NCCL runs a batch of sends and receives (``batch_isend_irecv``, pipelines) as one kernel, which is launched at
the end of the batch and has no metadata (mlcommons/chakra#178). Its messages are the operators that the same
thread has called since the previous such kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from chakra_et.convert.graph.communication_arguments import Around, Facts, message_ends
from chakra_et.convert.graph.kernel_table import Operation, operation_named
from chakra_et.convert.graph.launchers import Launchers
from chakra_et.et.columns import NodeType

SENDS = ("c10d::send",)
RECEIVES = ("c10d::recv_", "c10d::recv_any_source_")


@dataclass(frozen=True)
class Message:
    """One send or receive. ``launch``: row of its operator; ``size``: bytes; ``peer``: rank in the group."""

    launch: int
    type: NodeType
    size: int
    dtype: str
    peer: int
    tag: int
    facts: Facts
    storages: frozenset[int]


class Pending:
    """The communication operators of each thread that no kernel has executed yet."""

    def __init__(self, around: Around, launchers: Launchers) -> None:
        self._around = around
        self._recorded: dict[int, int] = {}
        device = around.device
        self._waiting: dict[int, list[int]] = {}
        for row in launchers.rows.tolist():
            if around.name(row).startswith("c10d::"):
                self._waiting.setdefault(int(device.thread[row]), []).append(row)
        codes = {code for code, name in enumerate(device.names) if name == "record_param_comms"}
        for row in np.flatnonzero(np.isin(device.name, list(codes))).tolist() if self._waiting else ():
            for outer in around.chain(row):
                self._recorded.setdefault(outer, row)

    def take(self, call: int, chain: list[int]) -> list[int]:
        """The operators of the kernel that ``call`` launches, in time order; they are no longer pending.

        A kernel launched inside an operator (in ``chain``, the events around ``call``) executes only that.
        """
        if call < 0:
            return []
        device = self._around.device
        thread = int(device.thread[call])
        waiting = self._waiting.get(thread, [])
        before = [row for row in waiting if device.start[row] <= device.start[call]]
        own = [row for row in before if row in chain]
        self._waiting[thread] = [row for row in waiting if device.start[row] > device.start[call]]
        return own[-1:] or before

    def messages(self, rows: list[int]) -> list[Message]:
        """The sends and receives among ``rows``."""
        return [self._message(row) for row in rows if self._around.name(row) in (*SENDS, *RECEIVES)]

    def bytes(self, rows: list[int], what: Operation | None) -> int:
        """Total bytes that the operators of type ``what`` among ``rows`` contribute."""
        return sum(self._size(row) for row in rows if operation_named(self._around.name(row)) is what)

    def _size(self, row: int) -> int:
        return self._facts(row).bytes(received=False) or sum(each for each, _ in self._around.tensors(row))

    def _facts(self, row: int) -> Facts:
        recorded = self._recorded.get(row, -1)
        return self._around.facts([row] if recorded < 0 else [row, recorded])

    def _message(self, row: int) -> Message:
        around = self._around
        is_send = around.name(row) in SENDS
        facts = self._facts(row)
        tensors = around.tensors(row)
        peer, tag = message_ends(around.values(row))
        return Message(
            launch=row,
            type=NodeType.COMM_SEND if is_send else NodeType.COMM_RECV,
            size=facts.bytes(received=not is_send) or sum(each for each, _ in tensors),
            dtype=facts.dtype or around.dtype(row),
            peer=peer,
            tag=tag,
            facts=facts,
            storages=frozenset(storage for _, storage in tensors if storage >= 0),
        )
