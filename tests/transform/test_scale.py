"""Sets of more ranks than were captured: groups, sizes, files that ranks share, and what is refused."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from chakra_et.__main__ import main
from chakra_et.et import file as et_file
from chakra_et.et.columns import CollectiveType, ExecutionTrace, NodeType
from chakra_et.job.mesh import Mesh, Place, mesh_of, parse_mesh, shape_of
from chakra_et.transform.rank_copies import with_members
from tests.astra.sets import MESH, step, write_set
from tests.simulate.replay_traces import collective, cpu, kernel, make_trace, makespan_ns, replay_device


def ddp(rank: int, ranks: int, slow: int = 0) -> ExecutionTrace:
    """Two steps of data-parallel training whose compute takes 1000 µs, ``slow`` µs more on rank 1."""
    nodes, last = [], ()
    for at in range(2):
        first = 10 * at + 1
        compute = 1000 + (slow if rank == 1 else 0)
        begin = 5000 * at
        more = {"comm_size": 1 << 20, "is_cpu_op": 0}
        nodes += [
            cpu(first, 1, last, name=f"ProfilerStep#{at}", start=begin + 1),
            cpu(first + 1, compute, (first,), start=begin + 2),
            collective(first + 2, 800, (first + 1,), start=begin + 1 + compute, **more),
            collective(first + 3, 90, (first + 2,), start=begin + 2000, **more, comm_type=2),
            cpu(first + 4, 100, (first + 3,), start=begin + 2100),
        ]
        last = (first + 4,)
    return make_trace(*nodes, rank=rank, world_size=ranks)


@pytest.fixture
def pair(tmp_path: Path) -> str:
    return write_set(tmp_path / "set", {rank: ddp(rank, 2, 100) for rank in range(2)}, {"1": [0, 1]})


def scaled(name: str, folder: Path, dp: int, *flags: str) -> dict[int, ExecutionTrace]:
    assert main(["scale", name, "--dp", str(dp), "-o", str(folder / "big"), *flags]) == 0
    count = len(list(folder.glob("big.*.et")))
    return {rank: et_file.read(folder / f"big.{rank}.et") for rank in range(count)}


def test_data_parallel_ranks_share_files(pair: str, tmp_path: Path) -> None:
    traces = scaled(pair, tmp_path / "out", 64, "--variants", "3")
    assert len(traces) == 64
    inodes = {path.stat().st_ino for path in (tmp_path / "out").glob("big.*.et")}
    assert 2 < len(inodes) <= 8
    groups = json.loads((tmp_path / "out" / "big_comm_groups.json").read_text())
    assert groups == {"1": list(range(64))}
    assert main(["validate", str(tmp_path / "out" / "big"), "--for", "astra-sim"]) == 0
    for trace in traces.values():
        assert trace.column("comm_size")[trace.column("comm_type", -1) == 0].tolist() == [1 << 20] * 2
        # The whole that 2 ranks gathered from 1 MiB each, from 64.
        assert trace.column("comm_size")[trace.column("comm_type", -1) == 2].tolist() == [1 << 15] * 2
        assert "wait_micros" not in trace.attributes
        assert not trace.start_micros.any()


def test_copies_vary_as_the_captured_ranks_do(pair: str, tmp_path: Path) -> None:
    traces = scaled(pair, tmp_path / "out", 150, "--variants", "150")
    computes = traces[0].types == NodeType.COMP
    totals = np.array([float(trace.duration_micros[computes].sum()) for trace in traces.values()])
    # Ranks 0 and 1 had 1101 and 1201 µs per step: a standard deviation of 6.1% of their mean.
    per_step = np.std(totals[2:] / totals[2:].mean(), ddof=1) * np.sqrt(2)
    assert per_step == pytest.approx(100 / np.sqrt(2) / 1151, rel=0.25)
    assert totals[2:].mean() == pytest.approx(2 * 1151, rel=0.02)
    assert totals[:2].tolist() == [2 * 1101 + 0, 2 * 1201]


def test_the_same_seed_gives_the_same_files(pair: str, tmp_path: Path) -> None:
    for folder, seed in [("a", "1"), ("b", "1"), ("c", "2")]:
        scaled(pair, tmp_path / folder, 8, "--seed", seed)
    same, again, other = (
        [(tmp_path / folder / f"big.{rank}.et").read_bytes() for rank in range(8)] for folder in "abc"
    )
    assert same == again
    assert same[:2] == other[:2]
    assert same[2:] != other[2:]


def test_no_spread_makes_ranks_alike(pair: str, tmp_path: Path) -> None:
    scaled(pair, tmp_path / "out", 16, "--spread", "0", "--variants", "1")
    traces = [et_file.read(tmp_path / "out" / f"big.{rank}.et") for rank in range(16)]
    computes = traces[0].types == NodeType.COMP
    totals = [int(trace.duration_micros[computes].sum()) for trace in traces]
    assert totals[:2] == [2202, 2402]
    assert totals[2:] == pytest.approx([2302] * 14, abs=2)
    assert len({(tmp_path / "out" / f"big.{rank}.et").stat().st_ino for rank in range(16)}) == 4


def test_every_group_of_a_mesh_is_multiplied(tmp_path: Path) -> None:
    name = write_set(tmp_path / "set", {rank: step(rank) for rank in range(8)}, MESH)
    traces = scaled(name, tmp_path / "out", 6)
    assert len(traces) == 24
    groups = json.loads((tmp_path / "out" / "big_comm_groups.json").read_text())
    found = sorted(tuple(members) for members in groups.values())

    def rank(tensor: int, data: int, stage: int) -> int:
        return tensor + 2 * (data + 6 * stage)

    expected = [tuple(range(24))]
    expected += [tuple(rank(t, d, p) for t in range(2)) for d, p in product(range(6), range(2))]
    expected += [tuple(rank(t, d, p) for d in range(6)) for t, p in product(range(2), range(2))]
    assert found == sorted(expected)
    for number, trace in traces.items():
        for row in np.flatnonzero(trace.types == NodeType.COMM_COLL).tolist():
            column = trace.attributes["pg_name"]
            at = int(np.searchsorted(column.rows, row))
            assert number in groups[column.values[at]]
    assert traces[5].column("comm_dst", -1).max() == 17
    assert main(["validate", str(tmp_path / "out" / "big")]) == 0
    assert makespan_ns(replay_device(list(traces.values()), comm_groups=groups)) > 0
    assert (
        main(
            [
                "astra",
                str(tmp_path / "out" / "big"),
                "-o",
                str(tmp_path / "b"),
                "--topology",
                "dgx-a100, 3 nodes",
            ]
        )
        == 0
    )


def test_expert_groups_keep_their_size_and_grow_in_number() -> None:
    mesh = Mesh(1, 8, 1)
    experts, replicas = shape_of([2, 3], mesh), shape_of([1, 5], mesh)
    assert experts is not None
    assert (experts.along, experts.size) == ("block", 2)
    assert replicas is not None
    assert (replicas.along, replicas.size) == ("stride", 4)
    assert shape_of([1, 2], mesh) is None
    assert shape_of([0, 1, 3], mesh) is None


def test_process_groups_with_the_same_members_stay_apart(tmp_path: Path) -> None:
    def rank(number: int) -> ExecutionTrace:
        return make_trace(cpu(1, 10), collective(2, 20, (1,), "1"), collective(3, 20, (1,), "2"))

    name = write_set(
        tmp_path / "set", {number: rank(number) for number in range(2)}, {"1": [0, 1], "2": [0, 1]}
    )
    scaled(name, tmp_path / "out", 4)
    found = json.loads((tmp_path / "out" / "big_comm_groups.json").read_text())
    assert found == {"1": [0, 1, 2, 3], "2": [0, 1, 2, 3]}


def test_a_set_without_data_parallelism_needs_its_operators(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    traces = {number: make_trace(cpu(1, 10), collective(2, 20, (1,), "1")) for number in range(2)}
    name = write_set(tmp_path / "set", traces, {"1": [0, 1]})
    assert main(["scale", name, "--dp", "4", "--mesh", "tp2", "-o", str(tmp_path / "new" / "big")]) == 2
    said = capsys.readouterr().err
    assert "its nodes have no attribute lane, from which operators are told" in said
    assert not (tmp_path / "new").exists() or not list((tmp_path / "new").iterdir())


def test_expert_parallel_sets_are_scaled(tmp_path: Path) -> None:
    groups = {"1": [0, 1, 2, 3], "2": [0, 1], "3": [2, 3], "4": [0, 2], "5": [1, 3]}

    def rank(number: int) -> ExecutionTrace:
        more = {"is_cpu_op": 0, "comm_size": 4096}
        return make_trace(
            cpu(1, 10),
            collective(2, 20, (1,), str(2 + number // 2), comm_type=int(CollectiveType.ALL_TO_ALL), **more),
            collective(3, 20, (2,), str(4 + number % 2), **more),
            collective(4, 20, (3,), "1", **more),
        )

    name = write_set(tmp_path / "set", {number: rank(number) for number in range(4)}, groups)
    scaled(name, tmp_path / "out", 8, "--mesh", "dp4")
    found = json.loads((tmp_path / "out" / "big_comm_groups.json").read_text())
    expected = [[0, 1], [2, 3], [4, 5], [6, 7], [0, 2, 4, 6], [1, 3, 5, 7], list(range(8))]
    assert sorted(found.values()) == sorted(expected)
    assert main(["scale", name, "--dp", "7", "--mesh", "dp4", "-o", str(tmp_path / "odd" / "x")]) == 2


def test_the_mesh_comes_from_groups_messages_or_descriptions() -> None:
    assert mesh_of(MESH, {}, {4}, 8) == Mesh(2, 2, 2)
    assert mesh_of({"1": [0, 1, 2, 3]}, {}, set(), 4) == Mesh(1, 4, 1)
    # Eight ranks in two stages of four that reduce gradients: nothing but neighbours.
    assert mesh_of({"1": [0, 1, 2, 3], "2": [4, 5, 6, 7]}, {}, {4}, 8) == Mesh(1, 4, 2)
    described = {"TENSOR_MODEL_PARALLEL_GROUP": [0, 1], "PIPELINE_MODEL_PARALLEL_GROUP": [0, 4]}
    assert mesh_of({"2": [0, 1]}, described, set(), 8) == Mesh(2, 2, 2)
    assert parse_mesh("tp2, dp4,pp=2", 16) == Mesh(2, 4, 2)
    assert Mesh(2, 3, 2).place(9) == Place(1, 1, 1)
    assert all(Mesh(2, 3, 2).rank(Mesh(2, 3, 2).place(rank)) == rank for rank in range(12))


def test_missing_ranks_are_made_before_scaling(pair: str, tmp_path: Path) -> None:
    """A capture of one rank was refused, and made ranks varied by steps that held others' work."""
    Path(f"{pair}.1.et").unlink()
    traces = scaled(pair, tmp_path / "out", 16, "--fill")
    computes = traces[0].types == NodeType.COMP
    totals = [int(trace.duration_micros[computes].sum()) for trace in traces.values()]
    assert totals == pytest.approx([2202] * 16, rel=0.01)
    assert main(["validate", str(tmp_path / "out" / "big")]) == 0


def test_collectives_take_the_members_of_their_own_group() -> None:
    """Without a group they are of all ranks. A rank's shard of an all-gather shrinks as members are added."""
    gathers = [
        {"comm_type": CollectiveType.ALL_GATHER, "comm_size": 4096, "lane": at} | group
        for at, group in enumerate(({"pg_name": "1"}, {"pg_name": "2"}, {}))
    ]
    nodes = [kernel(at, 8, type=NodeType.COMM_COLL, **each) for at, each in enumerate(gathers, 1)]
    members = {"1": (2, 2), "2": (2, 4), "": (4, 32)}
    made = with_members(make_trace(*nodes), members, lambda kind, before, after, group, micros: micros)
    assert made.column("comm_size").tolist() == [4096, 2048, 512]


def test_files_and_their_bytes_are_said_before_they_are_written(
    pair: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages between stages name ranks, so that files differ where their work doesn't."""
    traces = {rank: step(rank) for rank in range(8)}
    name = write_set(tmp_path / "mesh", traces, MESH)
    scaled(name, tmp_path / "out", 32, "--mesh", "tp2,dp2,pp2", "--variants", "2")
    said = capsys.readouterr().out.splitlines()
    at = next(at for at, line in enumerate(said) if "different files for" in line)
    assert "128 different files for 128 ranks" in said[at]
    assert "24 differ in their work, the others in the ranks" in said[at]
    about = float(said[at].split("about ")[1].split(" kB")[0]) * 1e3
    taken = sum(path.stat().st_size for path in (tmp_path / "out").glob("big.*.et"))
    assert about == pytest.approx(taken, rel=0.1)
    scaled(pair, tmp_path / "pair", 32, "--variants", "2")
    assert "6 different files for 32 ranks" in capsys.readouterr().out
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=9))
    assert main(["scale", name, "--dp", "64", "-o", str(tmp_path / "full" / "big")]) == 2
    assert "choose another -o, or fewer --variants" in capsys.readouterr().err
    assert not list(tmp_path.glob("full/*.et"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dp", "0"], "--dp 0: use 1 to 131,072"),
        (["--dp", "4", "--tp", "2"], "how tensors are sharded: capture a run with 2\n"),
        (["--dp", "4", "--tp", "4"], "how tensors are sharded: capture a run with 2 or with 4"),
        (
            ["--dp", "4", "--pp", "2"],
            "--pp 2: the captured run has 1, which doesn't show the messages between stages",
        ),
        (["--dp", "4", "--mesh", "tp3"], "--mesh 'tp3' has 3 ranks, and the set 2"),
        (["--dp", "4", "--mesh", "many"], "--mesh 'many' can't be read"),
        (["--dp", "4", "--network", "10 parsecs"], "topology '10 parsecs'"),
        (["--dp", "1000000"], "--dp 1000000: use 1 to 131,072"),
        (["--dp", "4", "--spread", "2"], "--spread is 2.0: give 0 to 1"),
    ],
)
def test_what_can_not_be_scaled_is_refused(
    pair: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    try:
        status = main(["scale", pair, "-o", str(tmp_path / "new" / "big"), *flags])
    except SystemExit as error:
        status = int(str(error))
    assert status == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("new/*.et"))


def test_a_group_that_is_no_grid_of_the_given_mesh_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was an assertion that failed."""
    name = write_set(tmp_path / "mesh", {rank: step(rank) for rank in range(8)}, MESH)
    made = tmp_path / "new" / "big"
    assert main(["scale", name, "--dp", "4", "--mesh", "dp8", "-o", str(made)]) == 2
    assert "is no grid of tp 1 × dp 8 × pp 1: give another --mesh" in capsys.readouterr().err
    assert not made.parent.exists() or not list(made.parent.iterdir())


def test_an_incomplete_set_or_one_without_groups_is_refused(
    pair: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scaled(pair, tmp_path / "out", 4)
    assert main(["scale", pair, "--dp", "4", "-o", str(tmp_path / "out" / "big")]) == 2
    assert "is there already" in capsys.readouterr().err
    Path(f"{pair}.1.et").unlink()
    assert main(["scale", pair, "--dp", "4"]) == 2
    assert "1 of 2 ranks have no file, rank 1 for one" in capsys.readouterr().err
    Path(f"{pair}_comm_groups.json").unlink()
    assert main(["scale", pair, "--dp", "4"]) == 2
    assert "no comm-group file" in capsys.readouterr().err
