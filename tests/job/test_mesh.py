"""The mesh of a run: from descriptions of its groups, else from what they do; what is unclear is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from chakra_et.__main__ import main
from chakra_et.errors import TraceError
from chakra_et.et.columns import CollectiveType, ExecutionTrace
from chakra_et.job.mesh import Mesh, axes_of, find_mesh, forward_uses, mesh_of, message_distances, stages_of
from tests.astra.sets import write_set
from tests.simulate.replay_traces import collective, cpu, make_trace, recv, send


@pytest.mark.parametrize(
    ("description", "axes"),
    [
        ("default_pg", ""),
        ("undefined", ""),
        ("mesh_dp", "dp"),
        ("mesh_dp_replicate", "dp"),
        ("mesh_dp_shard", "dp"),
        ("mesh_dp_shard_cp", "dp cp"),
        ("mesh_tp", "tp"),
        ("mesh_pp", "pp"),
        ("mesh_cp", "cp"),
        ("mesh_ep", "ep"),
        ("TENSOR_MODEL_PARALLEL_GROUP", "tp"),
        ("PIPELINE_MODEL_PARALLEL_GROUP", "pp"),
        ("DATA_PARALLEL_GROUP_WITH_CP", "dp cp"),
        ("TENSOR_AND_DATA_PARALLEL_GROUP", "tp dp"),
        ("EXPERT_MODEL_PARALLEL_GROUP", "ep"),
        ("MODEL_PARALLEL_GROUP", ""),
        ("EMBEDDING_GROUP", "embedding"),
        ("ep_size_2", "ep"),
        ("data_parallel_group", "dp"),
        ("sequence_parallel_group", "cp"),
    ],
)
def test_descriptions_name_axes(description: str, axes: str) -> None:
    assert axes_of(description) == set(axes.split())


def test_a_mesh_that_is_given_counts() -> None:
    assert find_mesh("made", {}, {}, 8, "tp2 pp=2") == Mesh(2, 2, 2)


def test_messages_of_known_ends_tell_how_far_ranks_are_apart() -> None:
    sends = [send(1, 5, 2, comm_src=0), send(2, 5, 0, comm_src=3), send(3, 5, 7, comm_src=-1), send(4, 5, 1)]
    assert message_distances([make_trace(*sends), make_trace(recv(1, 5, 9))]) == {2, 3}


def test_device_meshes_by_name_make_a_mesh() -> None:
    described = {"mesh_tp": [0, 1], "mesh_pp": [0, 4], "mesh_dp": [0, 2]}
    groups = {"1": [0, 1], "2": [0, 4], "3": [0, 2]}
    assert mesh_of(groups, described, set(), 8) == Mesh(2, 2, 2)
    # With data parallelism innermost the ranks lie in another order.
    with pytest.raises(TraceError, match=r"the tp group of ranks 0, 2 doesn't lie along tp of tp 2 × dp 2"):
        mesh_of({"1": [0, 1]}, {"mesh_tp": [0, 2]}, set(), 4)


def rank(kind: CollectiveType, size: int = 4096, phase: str = "forward", **more: str) -> ExecutionTrace:
    """A step with a collective in a forward pass, and a gradient's."""
    texts = {"pg_description": "default_pg", **more}
    return make_trace(
        cpu(1, 10, kind="operator", phase=phase),
        collective(2, 20, (1,), "1", comm_type=int(kind), comm_size=size, phase=phase, **texts),
        collective(3, 20, (2,), "1", comm_size=1 << 20, phase="backward", **texts),
    )


@pytest.mark.parametrize("command", [["scale", "--dp", "4"], ["predict", "--ranks", "4"]])
def test_tensor_parallelism_without_a_name_is_no_data_parallelism(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """examples/tensor_parallel.py on two ranks was scaled as "tp 1 × dp 2", with exit status 0."""
    traces = {number: rank(CollectiveType.ALL_REDUCE) for number in range(2)}
    name = write_set(tmp_path / "set", traces, {"1": [0, 1]})
    out = ["-o", str(tmp_path / "out" / "big")] if command[0] == "scale" else []
    assert main([command[0], name, *command[1:], *out]) == 2
    assert "group 1 has 1 all-reduce inside the forward pass" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "trace",
    [
        rank(CollectiveType.ALL_REDUCE, size=4),  # a loss
        rank(CollectiveType.BROADCAST),  # DDP's buffers
        rank(CollectiveType.ALL_REDUCE, phase="backward"),
        rank(CollectiveType.ALL_GATHER, pg_description="mesh_dp_shard"),
    ],
)
def test_what_data_parallelism_does_in_the_forward_pass_is_none(trace: ExecutionTrace) -> None:
    assert forward_uses([trace]) == {}


def test_stages_come_from_pipeline_groups_by_any_name() -> None:
    for text in ("PIPELINE_MODEL_PARALLEL_GROUP", "mesh_pp", "pipe"):
        trace = make_trace(cpu(1, 10), process_groups=f'{{"1": ["1", "{text}", [0, 2]]}}')
        assert stages_of([trace], [0, 1, 2]) == {0: 0, 1: 0, 2: 1}
