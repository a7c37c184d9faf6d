"""Sets as the symbolic tensor graph generator (STG) writes them: the nodes and attributes of its backend
``Chakra v0.0.4``, in the generator's own order, made with the protobuf classes of mlc-chakra."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any


def write_stg(pb2: ModuleType, folder: Path, stages: int = 2, dp: int = 2, layers: int = 3) -> str:
    """A step of ``layers`` per stage on ``stages`` × ``dp`` ranks, without times; returns its NAME."""
    folder.mkdir(parents=True, exist_ok=True)
    groups = {str(1 + stage): [stage * dp + at for at in range(dp)] for stage in range(stages)}
    for rank in range(stages * dp):
        stage = rank // dp
        messages: list[Any] = [pb2.GlobalMetadata(attr=[attribute(pb2, "schema", "symbolic_tensor_network")])]

        def add(name: str, kind: int, *deps: int, messages: list[Any] = messages, **attributes: Any) -> int:
            node = pb2.Node(id=len(messages) - 1, name=name, type=kind, data_deps=deps)
            for of in ("inputs", "outputs"):
                listed = pb2.AttributeProto(name=of)
                listed.string_list.values.extend([f"{name}@{of}", "65536"])
                node.attr.append(listed)
            node.attr.extend(attribute(pb2, key, value) for key, value in attributes.items())
            messages.append(node)
            return len(messages) - 2

        work = {"num_ops": 1 << 33, "tensor_size": 1 << 20, "op_type": "M", "op_category": 0}
        message = {"comm_size": 1 << 20, "comm_tag": 7}
        last: tuple[int, ...] = ()
        if stage:
            last = (add("recv", pb2.COMM_RECV_NODE, **message, comm_src=rank - dp, is_cpu_op=0),)
        for layer in range(layers):
            last = (add(f"transformer.{layer}.x_mm", pb2.COMP_NODE, *last, **work),)
        if stage < stages - 1:
            add("send", pb2.COMM_SEND_NODE, *last, **message, comm_dst=rank + dp, is_cpu_op=0)
        reduced = {"comm_size": 1 << 22, "comm_type": 0, "pg_name": str(1 + stage), "is_cpu_op": 0}
        add("grad_ALLREDUCE", pb2.COMM_COLL_NODE, *last, **reduced)
        with (folder / f"workload.{rank}.et").open("wb") as file:
            for each in messages:
                raw, size = each.SerializeToString(), each.ByteSize()
                while size > 127:
                    file.write(bytes([size & 127 | 128]))
                    size >>= 7
                file.write(bytes([size]) + raw)
    (folder / "workload_comm_groups.json").write_text(json.dumps(groups))
    return str(folder / "workload")


def attribute(pb2: ModuleType, name: str, value: int | str) -> Any:
    kinds = {"op_category": "int32", "is_cpu_op": "int32", "comm_tag": "int32", "comm_src": "int32"}
    kinds |= {"comm_dst": "int32", "tensor_size": "uint64"}
    kind = "string" if isinstance(value, str) else kinds.get(name, "int64")
    return pb2.AttributeProto(name=name, **{f"{kind}_val": value})
