"""The host trace of a run, in the layout of each schema."""

from __future__ import annotations

import json
from typing import Any

from tests.generator.layouts import DTYPE_BYTES, PID, Layout
from tests.generator.machine import LINKED_CATEGORIES, Event, Run
from tests.generator.program import Comm, Program, Tensor

FLAT = ("1.0.1", "1.0.2")
TYPES = {"scope": "uint64", "seq_id": "int64", "op_schema": "string"}


def host_trace(program: Program, run: Run, layout: Layout) -> dict[str, Any]:
    """The document, its nodes in the order in which the operators ended."""
    return _Host(program, run, layout).document()


class _Host:
    def __init__(self, program: Program, run: Run, layout: Layout) -> None:
        self.program, self.run, self.layout = program, run, layout
        self.next_id = 1
        self.threads = {name: number + 1 for number, name in enumerate(program.threads)}

    def document(self) -> dict[str, Any]:
        word = "graph" if self.layout.host == "1.0.1" else "trace"
        root = self._id()
        nodes = []
        thread_nodes = {}
        for name, tid in self.threads.items():
            thread_nodes[name] = self._id()
            structure = f"[pytorch|profiler|execution_{word}|thread]"
            nodes.append(self._node(thread_nodes[name], structure, root, tid=tid, scope=7))
        if self.program.groups:
            nodes.append(self._group_record(thread_nodes["main"]))
        by_number = {event.number: event for event in self.run.events}
        linked = sorted(
            (e for e in self.run.events if e.category in LINKED_CATEGORIES), key=lambda e: e.rf_id
        )
        ids = {}
        for event in linked:
            ids[event.number] = self._id()
            self.next_id += 3 * len(event.tensors)  # tensors and storages are numbered by the same counter
        for event in sorted(linked, key=lambda e: (e.end, -e.start, -e.number)):
            above = by_number.get(event.parent)
            while above is not None and above.number not in ids:
                above = by_number.get(above.parent)
            # A gloo worker's operators are pushed onto the stack of the thread that started them.
            thread = event.lane[1] if event.lane[0] == "cpu" else "main"
            parent = ids[above.number] if above is not None else thread_nodes[thread]
            nodes.append(self._operator(event, ids[event.number], parent, self.threads[thread]))
        nodes.append(self._node(root, f"[pytorch|profiler|execution_{word}|process]", root, tid=0, scope=7))
        schema = self.layout.host + ("" if self.layout.host in FLAT else "-chakra.0.0.4")
        return {
            "schema": schema,
            "pid": PID,
            "time": "2026-11-21 01:02:00",
            "start_ts": 683686,
            "nodes": nodes,
            "finish_ts": 684341,
        }

    def _id(self) -> int:
        self.next_id += 1
        return self.next_id - 1

    def _operator(self, event: Event, node_id: int, parent: int, tid: int) -> dict[str, Any]:
        inputs, outputs = self._tensors(event.tensors, more=[1]), self._tensors(event.tensors)
        if event.comm is not None:
            inputs, outputs = self._communication(event, event.comm)
        attrs: dict[str, Any] = {"scope": 0 if event.category == "cpu_op" else 7, "seq_id": event.sequence}
        if self.layout.ids:
            attrs["rf_id"] = event.rf_id
        else:
            attrs["rf_id"] = event.rf_id - 1  # counts from another start, so that it can't be used to link
        attrs["fw_tid"] = self.threads.get(event.forward, 0)
        if event.name.startswith("aten::"):
            attrs["op_schema"] = f"{event.name}(Tensor self) -> Tensor"
        node = self._node(node_id, event.name, parent, inputs, outputs, tid=tid, **attrs)
        if event.name == "record_param_comms" and event.comm is not None:
            self._add_comm_attrs(node, event.comm)
        return node

    def _node(
        self,
        node_id: int,
        name: str,
        parent: int,
        inputs: tuple = ([], [], []),
        outputs: tuple = ([], [], []),
        **attrs: Any,
    ) -> dict[str, Any]:
        values = {
            "rf_id": 0,
            "fw_parent": 0,
            "seq_id": -1,
            "scope": 0,
            "tid": 1,
            "fw_tid": 0,
            "op_schema": "",
        } | attrs
        if self.layout.host in FLAT:
            fields = {"name": name, "id": node_id, **values, "parent": parent}
            for side, (items, shapes, types) in (("input", inputs), ("output", outputs)):
                fields |= {f"{side}s": items, f"{side}_shapes": shapes, f"{side}_types": types}
            return fields
        if self.layout.host in ("1.1.0", "1.1.1"):
            values |= {"kernel_backend": "", "kernel_file": ""}
        if self.layout.host == "1.1.1":
            values |= {"tensor_range": ""}
        if self.layout.host == "9.9.9":
            values |= {"is_asynchronized_op": 0}
        sides = {}
        for side, (items, shapes, types) in (("inputs", inputs), ("outputs", outputs)):
            sides[side] = {"values": items, "shapes": shapes, "types": types}
            if self.layout.host in ("1.1.1", "9.9.9"):
                sides[side]["strides"] = shapes
        listed = [
            {
                "name": key,
                "type": TYPES.get(key, "uint64" if key != "kernel_backend" else "string"),
                "value": value,
            }
            for key, value in values.items()
        ]
        return {"id": node_id, "name": name, "ctrl_deps": parent, **sides, "attrs": listed}

    def _tensors(self, tensors: list[Tensor], more: list[Any] | None = None) -> tuple[list, list, list]:
        more = more or []
        values = [
            [t.storage + 50_000, t.storage, 0, t.elements, DTYPE_BYTES[t.dtype], t.device] for t in tensors
        ]
        return (
            [*values, *more],
            [*([t.elements] for t in tensors), *([] for _ in more)],
            [*(f"Tensor({t.dtype})" for t in tensors), *("Int" for _ in more)],
        )

    def _communication(self, event: Event, comm: Comm) -> tuple[tuple, tuple]:
        """Inputs and outputs of a c10d operator, record_param_comms or the backend's own operator."""
        device = (
            "cpu"
            if event.lane[0] == "comm" or event.name.startswith("c10d::") and self._on_cpu(event)
            else "cuda:0"
        )
        value = [comm.storage + 50_000, comm.storage, 0, comm.elements, DTYPE_BYTES[comm.dtype], device]
        shape, kind = [comm.elements], f"Tensor({comm.dtype})"
        result = [comm.storage + 60_000, comm.storage + 40_000, 0, comm.out_elements, value[4], device]
        if event.name.startswith(("nccl:", "gloo:")):
            inputs = ([], [], []) if comm.kind == "barrier" else ([value], [shape], [kind])
            return inputs, ([], [], [])
        if event.name == "record_param_comms":
            group = [
                comm.group,
                next((g.description for g in self.program.groups if g.name == comm.group), ""),
            ]
            values = [[value], event.number, group, self.program.rank, comm.kind, [], []]
            return (
                values,
                [[shape], [], [], [], [], [], []],
                [f"GenericList[{kind}]", "Int", "", "Int", "String", "", ""],
            ), (
                [[value]],
                [[shape]],
                [f"GenericList[{kind}]"],
            )
        if comm.kind in ("send", "recv"):
            peer = comm.target if comm.kind == "send" else comm.source
            in_group = next(g.ranks for g in self.program.groups if g.name == comm.group).index(peer)
            values: list[Any] = [[value], "<Object>", in_group, comm.tag]
        elif comm.kind in ("_allgather_base", "_reduce_scatter_base", "all_to_allv"):
            values = [result, value, "<Object>", comm.asynchronous, -1]
        else:
            values = [[value], "<Object>", "<Object>", "<None>", comm.asynchronous, -1]
        types = [
            "Object"
            if isinstance(v, str)
            else "Bool"
            if isinstance(v, bool)
            else "Int"
            if isinstance(v, int)
            else kind
            if isinstance(v[0], int)
            else f"GenericList[{kind}]"
            for v in values
        ]
        return (values, [[] for _ in values], types), (["<Object>"], [[]], ["Object"])

    def _on_cpu(self, event: Event) -> bool:
        return any(e.lane[0] == "comm" and e.call == event.number for e in self.run.events)

    def _add_comm_attrs(self, node: dict[str, Any], comm: Comm) -> None:
        if not self.layout.comm_attrs or self.layout.host in FLAT:
            return
        group = next(g for g in self.program.groups if g.name == comm.group)
        for name, kind, value in (
            ("collective_name", "string", comm.kind),
            ("dtype", "string", comm.dtype.title().removeprefix("C10::")),
            ("in_msg_nelems", "uint64", comm.elements),
            ("out_msg_nelems", "uint64", comm.out_elements),
            ("in_split_size", "string", "[]"),
            ("out_split_size", "string", "[]"),
            ("global_rank_start", "uint64", group.ranks[0]),
            ("global_rank_stride", "uint64", 1),
            ("pg_name", "string", group.name),
            ("pg_desc", "string", group.description),
            ("pg_size", "uint64", len(group.ranks)),
        ):
            node["attrs"].append({"name": name, "type": kind, "value": value})

    def _group_record(self, parent: int) -> dict[str, Any]:
        groups = [
            {
                "pg_name": g.name,
                "pg_desc": g.description,
                "backend_config": "cpu:gloo,cuda:nccl",
                "ranks": [] if g.name == "0" else list(g.ranks),
                "group_size": len(g.ranks),
                "group_count": len(self.program.groups),
            }
            for g in self.program.groups
        ]
        inputs = ([json.dumps(groups)], [[]], ["String"])
        return self._node(self._id(), "## process_group:init ##", parent, inputs, rf_id=1, scope=7)


def host_text(document: dict[str, Any], layout: Layout) -> str:
    """Formatted as by the observer, with one line per field of a node, or by ``json.dump``."""
    if layout.text == "line" or layout.host in FLAT:
        return json.dumps(document)
    header = {key: value for key, value in document.items() if key not in ("nodes", "finish_ts")}
    nodes = []
    for node in document["nodes"]:
        attrs = ",".join(json.dumps(attr) for attr in node["attrs"])
        head = f'"id": {node["id"]}, "name": {json.dumps(node["name"])}, "ctrl_deps": {node["ctrl_deps"]}'
        nodes.append(
            f'\n      {{\n        {head},\n        "inputs": {json.dumps(node["inputs"])},\n'
            f'        "outputs": {json.dumps(node["outputs"])},\n        "attrs": [{attrs}]\n      }}'
        )
    return (
        "{\n  " + json.dumps(header)[1:-1] + ',\n  "nodes": [' + ",".join(nodes) + "\n  ],\n"
        f'  "finish_ts": {document["finish_ts"]}\n}}\n'
    )
