"""Write tests/fixtures/traces: one folder per oddity of the formats, with the converter's result.

    python -m tests.generator.fixtures

The files are kept so that a change of the generator can't hide a change of the converter.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from chakra_et.convert.pair import Converted, convert_pair
from chakra_et.traces.sets import Pair
from tests.generator import Features, Layout, generate

FOLDER = Path(__file__).resolve().parents[1] / "fixtures" / "traces"
SMALL = {"operators": 2, "depth": 2, "resolution": 1_000}
ODDITIES: dict[str, tuple[str, Features, Layout]] = {
    "host_schema_1.0.1_flat": (
        "Schema 1.0.x: fields flat on the node, no numbers that both traces share, times in whole µs.",
        Features(
            seed=1, side_streams=True, waits=("item",), nccl=("allreduce",), nccl_kernels="old", **SMALL
        ),
        Layout("1.0.1", "absolute", ids=False, sync_events=False, comm_args=False, text="line"),
    ),
    "host_schema_1.0.3_attrs": (
        "Schema 1.0.3 with its fields in attrs, as in the public eight-GPU DLRM traces.",
        Features(seed=2, nccl=("all_to_allv",), nccl_kernels="old", **SMALL),
        Layout("1.0.3", "absolute", comm_args=False, comm_attrs=False, text="line"),
    ),
    "host_schema_1.1.0": (
        "PyTorch 2.4: kernel_backend and kernel_file, but no strides and no tensor_range.",
        Features(seed=3, devices=0, gloo=("allreduce", "broadcast"), late=True, **SMALL),
        Layout("1.1.0"),
    ),
    "host_schema_of_the_future": (
        "PyTorch 2.15 added is_asynchronized_op and kept the version number: read by feature.",
        Features(seed=4, autograd_thread=True, **SMALL),
        Layout("9.9.9", text="line"),
    ),
    "string_pids_and_tids": (
        "Kineto may write pid and tid as text, as it does for its own spans.",
        Features(seed=5, devices=0, **SMALL),
        Layout(string_ids=True, text="line"),
    ),
    "original_stream": (
        "PyTorch 2.15 can put the lane that it draws into stream; original_stream has the stream.",
        Features(seed=6, side_streams=True, **SMALL),
        Layout(original_stream=True, text="line"),
    ),
    "events_by_category": (
        "Kineto writes device events after all operators: the order of the file means nothing.",
        Features(seed=7, autograd_thread=True, accumulate_on_main=True, **SMALL),
        Layout(order="by category", text="line"),
    ),
    "overlapping_kernels_on_a_stream": (
        "Branches of a CUDA graph run beside each other under one stream number.",
        Features(seed=8, graphs=True, overlap=True, **SMALL),
        Layout(text="line"),
    ),
    "kernels_without_runtime_call": (
        "The launching call is not in the trace: the correlation id leads nowhere.",
        Features(seed=9, orphans=True, **SMALL),
        Layout(text="line"),
    ),
    "rccl_generic_kernels": (
        "RCCL names all its kernels alike: what they do stands in the operators around the launch.",
        Features(seed=10, nccl=("allreduce", "_allgather_base", "send"), nccl_kernels="rccl", **SMALL),
        Layout(comm_args=False, text="line"),
    ),
    "no_profiler_step": (
        "Profiled without step(): no ProfilerStep annotation, on which the reference chain fails.",
        Features(seed=11, step_annotations=False, waits=("device",), **SMALL),
        Layout(text="line"),
    ),
    "two_devices_in_a_process": (
        "One process with two GPUs: streams of the same number on both.",
        Features(seed=12, devices=2, **SMALL),
        Layout(text="line"),
    ),
}


def summary(converted: Converted) -> dict[str, Any]:
    """The values that are compared with the kept result."""
    report = converted.report
    kept = (
        "events_in",
        "events_kept",
        "losses",
        "link_rate",
        "nodes_by_kind",
        "edges_by_kind",
        "notes",
    )
    end = int(converted.trace.metadata["measured_end_micros"])
    return {name: getattr(report, name) for name in kept} | {"measured_end_micros": end}


def convert(folder: Path) -> Converted:
    return convert_pair(Pair(-1, folder / "run_host.json", folder / "run_device.json"))


def main() -> None:
    for name, (origin, features, layout) in ODDITIES.items():
        folder = FOLDER / name
        folder.mkdir(parents=True, exist_ok=True)
        generate(features, layout).write(folder)
        (folder / "README.md").write_text(f"{origin}\n")
        (folder / "expected.json").write_text(
            json.dumps(summary(convert(folder)), indent=1, sort_keys=True) + "\n"
        )


if __name__ == "__main__":
    main()
