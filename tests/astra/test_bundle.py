"""Bundles for ASTRA-sim: what is written, what a run of them gives, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from chakra_et.__main__ import main
from chakra_et.cost.units import GIB
from chakra_et.et import file as et_file
from chakra_et.et.columns import CollectiveType, ExecutionTrace, NodeType
from tests.astra.sets import MESH, run_astra, step, write_set
from tests.simulate.replay_traces import collective, cpu, kernel, make_trace, recv, send

TWO_NODES = "4xA100 NVLink, 2 nodes, 200 Gbit/s, 5 us"


@pytest.fixture
def mesh(tmp_path: Path) -> str:
    return write_set(tmp_path / "set", {rank: step(rank) for rank in range(8)}, MESH)


def bundle(name: str, folder: Path, *flags: str, topology: str = TWO_NODES) -> int:
    return main(["astra", name, "-o", str(folder), "--topology", topology, *flags])


def run(folder: Path, binary: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [folder / "run.sh", binary], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize(
    "topology",
    [
        TWO_NODES,
        "8xH100 NVLink",
        "8 ranks, 10 Gbit/s, 30 us",
        "2xT4 PCIe, 4 nodes, 25 Gbit/s, 10 us, fully connected",
    ],
)
def test_a_run_gives_the_expected_times(mesh: str, tmp_path: Path, topology: str) -> None:
    """The expectation has all members of a collective end together, the rings message by message do not."""
    folder = tmp_path / "bundle"
    assert bundle(mesh, folder, topology=topology) == 0
    done = run_astra(folder)
    assert done.returncode == 0, done.stdout + (folder / "astra.log").read_text()
    assert "8 of 8 ranks finished" in done.stdout
    assert main(["astra", "--check", str(folder / "astra.log"), "--max-error", "1"]) == 0
    assert main(["validate", str(folder / "run"), "--for", "astra-sim"]) == 0


def test_a_check_of_a_log_names_ranks_that_are_late_or_unfinished(
    mesh: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "bundle"
    bundle(mesh, folder)
    expected = json.loads((folder / "expected.json").read_text())["simulated"]
    lines = [f"[info] sys[{rank}] finished, {round(expected[str(rank)] * 1000)} cycles" for rank in range(8)]
    log = folder / "astra.log"
    log.write_text("\n".join(lines))
    assert main(["astra", str(folder), "--check", str(log), "--max-error", "0.01"]) == 0
    log.write_text("\n".join(lines[:5]))
    assert main(["astra", "--check", str(log)]) == 1
    assert "3 of 8 ranks did not finish: 5, 6, 7" in capsys.readouterr().out
    log.write_text("\n".join([*lines[:7], "sys[7] finished, 1 cycles"]))
    assert main(["astra", "--check", str(log), "--max-error", "5"]) == 1
    assert "the worst rank is off by -100.00%" in capsys.readouterr().out
    log.write_text("sys[8] finished, 1 cycles")
    assert main(["astra", "--check", str(log)]) == 2


def _pipeline(ranks: int, passes: int, size: int) -> dict[int, ExecutionTrace]:
    """Stages of one kernel per microbatch, messages in one stream, and a CPU operator in front."""
    traces = {}
    for rank in range(ranks):
        nodes = [cpu(1, 10)]

        def add(make: Callable[..., dict], *values: int, rank: int = rank, **more: int) -> None:
            at = len(nodes) + 1  # noqa: B023
            nodes.append(make(at, *values, (at - 1,), is_cpu_op=0, **more))  # noqa: B023

        for at in range(passes):
            message = {"comm_size": size, "comm_tag": at}
            if rank:
                add(recv, 5, rank - 1, comm_dst=rank, **message)
            add(kernel, 100)
            if rank < ranks - 1:
                add(send, 5, rank + 1, comm_src=rank, **message)
        traces[rank] = make_trace(*nodes, rank=rank, world_size=ranks)
    return traces


def test_a_send_waits_for_its_receiver_and_a_rank_can_end_with_it(tmp_path: Path) -> None:
    """Sends that waited for nobody ended up to 55% early; a rank with CPU operators whose last event was a
    message aborted the run."""
    name = write_set(tmp_path / "set", _pipeline(4, 6, 1 << 20), {"1": [0, 1, 2, 3]})
    for speed in ("0.1", "10", "1000"):
        folder = tmp_path / speed
        assert bundle(name, folder, topology=f"4 ranks, {speed} Gbit/s, 5 us") == 0
        done = run_astra(folder)
        assert "4 of 4 ranks finished (ASTRA-sim's exit status: 0)" in done.stdout
        assert main(["astra", "--check", str(folder / "astra.log"), "--max-error", "0.1"]) == 0
        content = json.loads((folder / "expected.json").read_text())
        assert content["protocol"]["sends"] == "rendezvous"
        handshake = 5 + 8192 * 8 / (float(speed) * 1e3)
        assert content["protocol"]["handshake"] == pytest.approx([handshake])
        assert f"{handshake:,.3f} us in dimension 1" in (folder / "README.md").read_text()
        assert "--rendezvous-protocol=true" in (folder / "run.sh").read_text()


def _two_streams(rank: int) -> ExecutionTrace:
    """Two groups of all ranks, each in a stream of its own, that no dependency puts in order."""
    generator = np.random.default_rng(rank)
    nodes: list[dict] = []
    ends: dict[str, tuple[int, ...]] = {"1": (), "2": ()}
    for _ in range(3):
        for group, kind in (("1", CollectiveType.ALL_REDUCE), ("2", CollectiveType.ALL_TO_ALL)):
            at, micros = len(nodes) + 1, int(generator.integers(10, 400))
            more = {"comm_type": int(kind), "comm_size": 1 << 20, "stream": int(group), "is_cpu_op": 0}
            nodes += [cpu(at, micros), collective(at + 1, 50, (at, *ends[group]), group, **more)]
            ends[group] = (at + 1,)
    return make_trace(*nodes, rank=rank, world_size=4)


def test_collectives_of_two_groups_have_one_order_on_all_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks that issued the groups' collectives as they became ready waited for each other for ever."""
    everyone = [0, 1, 2, 3]
    traces = {rank: _two_streams(rank) for rank in everyone}
    name = write_set(tmp_path / "set", traces, {"1": everyone, "2": everyone})
    assert main(["validate", name, "--for", "astra-sim"]) == 0
    assert "20 pairs of collectives or sends can run in either order" in capsys.readouterr().out
    for speed in ("0.1", "9", "10", "1000"):
        folder = tmp_path / speed
        assert bundle(name, folder, topology=f"4 ranks, {speed} Gbit/s, 1 us") == 0
        assert "20 dependencies were added" in capsys.readouterr().out
        assert "4 of 4 ranks finished" in run_astra(folder).stdout
        assert main(["astra", "--check", str(folder / "astra.log"), "--max-error", "1"]) == 0
    assert main(["validate", str(tmp_path / "10" / "run"), "--for", "astra-sim"]) == 0
    assert "astra-order" not in capsys.readouterr().out


@pytest.mark.parametrize("what", ["all-reduce", "all-gather", "reduce-scatter", "all-to-all"])
@pytest.mark.parametrize("algorithm", ["ring", "direct", "halvingDoubling", "doubleBinaryTree"])
def test_other_algorithms_of_system_json_finish(tmp_path: Path, algorithm: str, what: str) -> None:
    """expected.json is for what the bundle has; who writes others into system.json gets their times. Halving
    and doubling aborts on a collective of fewer bytes than ranks, and ASTRA-sim has no such all-to-all."""
    kind = int(CollectiveType[what.upper().replace("-", "_")])
    made = {"comm_size": 1 << 20, "is_cpu_op": 0, "comm_type": kind}
    traces = {r: make_trace(cpu(1, 5), collective(2, 5, (1,), **made), world_size=16) for r in range(16)}
    name = write_set(tmp_path / "set", traces, {"1": list(range(16))})
    bundle(name, tmp_path / "bundle", topology="4xA100 NVLink, 4 nodes, 200 Gbit/s, 5 us")
    path = tmp_path / "bundle" / "system.json"
    system = json.loads(path.read_text())
    path.write_text(json.dumps(system | {f"{what}-implementation": [algorithm] * 2}))
    finish = 0 if (what, algorithm) == ("all-to-all", "halvingDoubling") else 16
    assert f"{finish} of 16 ranks finished" in run_astra(tmp_path / "bundle").stdout


def test_memory_nodes_take_their_time(tmp_path: Path) -> None:
    nodes = [{"id": 1, "duration": 700, "type": NodeType.MEM_LOAD, "is_cpu_op": 0}]
    nodes += [{"id": 2, "duration": 300, "type": NodeType.MEM_STORE, "is_cpu_op": 0, "deps": (1,)}]
    nodes += [collective(3, 5, (2,), is_cpu_op=0)]
    name = write_set(tmp_path / "set", {rank: make_trace(*nodes) for rank in range(2)}, {"1": [0, 1]})
    assert bundle(name, tmp_path / "bundle", topology="2 ranks, 10 Gbit/s, 1 us") == 0
    assert "2 of 2 ranks finished" in run_astra(tmp_path / "bundle").stdout
    assert main(["astra", "--check", str(tmp_path / "bundle" / "astra.log"), "--max-error", "0.1"]) == 0
    expected = json.loads((tmp_path / "bundle" / "expected.json").read_text())["simulated"]
    assert expected["0"] > 1000


def test_a_log_of_an_abort_says_so(mesh: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle(mesh, tmp_path / "bundle")
    log = tmp_path / "bundle" / "astra.log"
    log.write_text(
        "sys[0] finished, 9 cycles\nterminate called after throwing an instance of 'std::runtime_error'\n"
        "  what():  Only GPU and COMM types are supported for overlap extraction\n"
    )
    assert main(["astra", "--check", str(log)]) == 1
    assert "ASTRA-sim aborted (status 134): Only GPU and COMM types" in capsys.readouterr().out


def test_a_ring_that_ASTRA_sim_aborts_on_is_refused_or_written_otherwise(
    mesh: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bundle(mesh, tmp_path / "ring", topology="8 ranks, 10 Gbit/s, 5 us, ring") == 2
    assert "aborts on one Ring of 8 ranks with several groups" in capsys.readouterr().err
    name = write_set(tmp_path / "pair", _pipeline(2, 2, 64), {"1": [0, 1]})
    folders = {"8 ranks, 10 Gbit/s, 5 us, fully connected": mesh, "2 ranks, 10 Gbit/s, 5 us, ring": name}
    for at, (topology, of) in enumerate(folders.items()):
        folder = tmp_path / str(at)
        assert bundle(of, folder, topology=topology) == 0
        assert "exit status: 0" in run_astra(folder).stdout
        assert main(["astra", "--check", str(folder / "astra.log"), "--max-error", "1"]) == 0
        assert main(["validate", str(folder / Path(of).name), "--for", "astra-sim"]) == 0
    said = capsys.readouterr().out
    assert "the 8 ranks are written as 4 × 2 with the same links" in said
    assert "a Ring of two ranks is written as FullyConnected" in said


def test_run_sh_fails_where_ranks_did_not_finish(mesh: str, tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    bundle(mesh, folder)
    for status, lines, good in [
        (0, "", False),
        (0, "sys[0] finished, 5 cycles", False),
        (134, "\n".join(f"sys[{rank}] finished, 5 cycles" for rank in range(8)), True),
        (0, "\n".join(["sys[3] finished, 5 cycles"] * 8), False),
    ]:
        binary = tmp_path / "binary"
        binary.write_text(f"#!/bin/sh\necho '{lines}'\nexit {status}\n")
        binary.chmod(0o755)
        done = run(folder, binary)
        assert (done.returncode == 0) == good, (status, lines, done.stdout)
    assert run(folder, tmp_path / "absent").returncode == 2


def test_the_network_is_in_gib_and_in_hops(mesh: str, tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    bundle(mesh, folder)
    text = (folder / "network.yml").read_text()
    rows = {line.split(":")[0]: line.split("[")[1].split("]")[0].split(",") for line in text.splitlines()}
    assert [int(each) for each in rows["npus_count"]] == [4, 2]
    assert [float(each) * GIB for each in rows["bandwidth"]] == pytest.approx([300e9, 25e9], rel=1e-6)
    assert [float(each) for each in rows["latency"]] == [1000, 2500]
    system = json.loads((folder / "system.json").read_text())
    assert system["all-reduce-implementation"] == ["ring", "ring"]
    assert system["roofline-enabled"] == 0
    assert system["local-mem-bw"] == 2039
    assert json.loads((folder / "run_comm_groups.json").read_text()) == MESH
    assert os.access(folder / "run.sh", os.X_OK)


def test_several_groups_on_one_dimension_get_two(mesh: str, tmp_path: Path) -> None:
    bundle(mesh, tmp_path / "bundle", topology="8xH100 NVLink")
    assert "npus_count: [ 4, 2 ]" in (tmp_path / "bundle" / "network.yml").read_text()
    whole = {rank: make_trace(cpu(1, 5), collective(2, 5, (1,), is_cpu_op=0)) for rank in range(8)}
    name = write_set(tmp_path / "whole", whole, {"1": list(range(8))})
    bundle(name, tmp_path / "one", topology="8xH100 NVLink")
    assert "npus_count: [ 8 ]" in (tmp_path / "one" / "network.yml").read_text()


def test_a_message_that_ASTRA_sim_puts_on_the_wrong_link_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = make_trace(send(1, 5, 3, comm_src=0, is_cpu_op=0))
    idle = make_trace(cpu(1, 5))
    last = make_trace(recv(1, 5, 0, comm_dst=3, is_cpu_op=0))
    name = write_set(tmp_path, {0: first, 1: idle, 2: idle, 3: last}, {"1": [0, 1, 2, 3]})
    bundle(name, tmp_path / "bundle", topology="2xA100, 2 nodes, 200 Gbit/s")
    assert "1 messages go to another node and another place in it" in capsys.readouterr().out
    assert "1 messages go to another node" in (tmp_path / "bundle" / "README.md").read_text()


def test_only_the_gpu_and_only_communication(mesh: str, tmp_path: Path) -> None:
    for flag, kinds in [("--gpu-only", {NodeType.COMP}), ("--comm-only", set())]:
        folder = tmp_path / flag[2:]
        assert bundle(mesh, folder, flag) == 0
        trace = et_file.read(folder / "run.0.et")
        assert not (trace.column("is_cpu_op") == 1).any()
        assert (trace.types == NodeType.COMP).any() == bool(kinds)
        assert run_astra(folder).returncode == 0
        assert main(["astra", "--check", str(folder / "astra.log"), "--max-error", "1"]) == 0
    times = [
        json.loads((tmp_path / name / "expected.json").read_text())["simulated"]["0"]
        for name in ("gpu-only", "comm-only")
    ]
    assert times[0] > times[1] > 0


def test_a_left_out_operator_passes_its_dependencies_on(tmp_path: Path) -> None:
    ranks = {}
    for rank in range(2):
        ranks[rank] = make_trace(
            kernel(1, 10, is_cpu_op=0),
            cpu(2, 10, (1,)),
            cpu(3, 10, (2,)),
            kernel(4, 10, (3,), stream=8, is_cpu_op=0),
            collective(5, 10, (4,), is_cpu_op=0),
        )
    name = write_set(tmp_path, ranks, {"1": [0, 1]})
    bundle(name, tmp_path / "bundle", "--gpu-only", topology="2 ranks, 10 Gbit/s, 1 us")
    trace = et_file.read(tmp_path / "bundle" / "run.0.et")
    assert trace.ids.tolist() == [1, 2, 3]
    assert trace.data_deps.values.tolist() == [1, 2]
    assert trace.data_deps.offsets.tolist() == [0, 0, 1, 2]


def test_collectives_that_ASTRA_sim_lacks_run_as_the_nearest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def rank(number: int) -> object:
        barrier = collective(1, 5, comm_type=int(CollectiveType.BARRIER), is_cpu_op=1)
        del barrier["comm_size"]
        return make_trace(
            barrier,
            collective(2, 5, (1,), comm_type=int(CollectiveType.REDUCE), is_cpu_op=0),
            collective(3, 5, (2,), group=str(2 + number), is_cpu_op=0),
            {"id": 4, "duration": 7, "deps": (3,), "type": NodeType.MEM_LOAD},
            send(5, 5, 99, (4,), comm_src=number, comm_tag=1) if number == 9 else cpu(5, 5, (4,)),
        )

    traces = {number: rank(number) for number in range(2)}
    name = write_set(tmp_path, traces, {"1": [0, 1], "2": [0], "3": [1]})  # type: ignore[arg-type]
    assert main(["validate", name, "--for", "astra-sim"]) == 1
    assert bundle(name, tmp_path / "bundle", topology="2 ranks, 10 Gbit/s, 1 us") == 0
    said = capsys.readouterr().out
    for sentence in [
        "2 collectives that ASTRA-sim doesn't have run as the nearest one: BARRIER as ALL_REDUCE",
        "2 collectives that ASTRA-sim doesn't have run as the nearest one: REDUCE as ALL_REDUCE",
        "2 memory nodes run as compute",
        "2 communications within one rank run as compute",
        "2 communications marked as CPU operators",
    ]:
        assert sentence in said
        assert sentence in (tmp_path / "bundle" / "README.md").read_text()
    trace = et_file.read(tmp_path / "bundle" / "run.0.et")
    assert trace.types.tolist() == [NodeType.COMM_COLL] * 2 + [NodeType.COMP] * 3
    assert trace.column("comm_type", -1).tolist() == [0, 0, -1, -1, -1]
    assert run_astra(tmp_path / "bundle").returncode == 0


@pytest.mark.parametrize("sizes", [(1 << 20, 1 << 18, 1 << 19, 1 << 20), (1 << 20, 0, 0, 0)])
@pytest.mark.parametrize("kind", ["ALL_GATHER", "GATHER", "SCATTER", "ALL_TO_ALL", "BROADCAST"])
def test_ranks_that_contribute_different_sizes_get_one(
    kind: str, sizes: tuple[int, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They were refused, or waited in ASTRA-sim for messages of their own size for ever."""
    traces = {}
    for rank, size in enumerate(sizes):
        first = collective(2, 50, (1,), comm_type=int(CollectiveType[kind]), comm_size=size, is_cpu_op=0)
        traces[rank] = make_trace(cpu(1, 100), first, collective(3, 50, (2,), is_cpu_op=0), world_size=4)
    name = write_set(tmp_path / "set", traces, {"1": [0, 1, 2, 3]})
    assert main(["validate", name, "--for", "astra-sim"]) == 1
    assert bundle(name, tmp_path / "bundle", topology="4 ranks, 10 Gbit/s, 5 us") == 0
    assert "parts of collectives have the bytes of the largest" in capsys.readouterr().out
    assert "4 of 4 ranks finished" in run_astra(tmp_path / "bundle").stdout
    assert main(["astra", "--check", str(tmp_path / "bundle" / "astra.log"), "--max-error", "0.1"]) == 0
    assert main(["validate", str(tmp_path / "bundle" / "run"), "--for", "astra-sim"]) == 0


def test_messages_of_2_gib_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """ASTRA-sim aborted, or took their size modulo 2^32."""
    for kind, size, refused in (
        ("ALL_GATHER", 1 << 31, True),
        ("ALL_REDUCE", 1 << 32, True),
        ("ALL_REDUCE", (1 << 32) - 2, False),
    ):
        more = {"comm_type": int(CollectiveType[kind]), "comm_size": size, "is_cpu_op": 0}
        traces = {rank: make_trace(cpu(1, 5), collective(2, 50, (1,), **more)) for rank in range(2)}
        name = write_set(tmp_path / "set", traces, {"1": [0, 1]})
        assert main(["validate", name, "--for", "astra-sim"]) == refused
        folder = tmp_path / f"{kind} {size}"
        assert bundle(name, folder, topology="2 ranks, 100 Gbit/s, 5 us") == 2 * refused
        if refused:
            said = capsys.readouterr()
            assert "[astra-size]" in said.out
            assert "node 2 has messages of 2,147,483,648 bytes" in said.err
            continue
        assert "2 of 2 ranks finished" in run_astra(folder).stdout
        assert main(["astra", "--check", str(folder / "astra.log"), "--max-error", "0.1"]) == 0


def test_missing_ranks_are_refused_or_trimmed(
    mesh: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (1, 5, 6, 7):
        Path(f"{mesh}.{rank}.et").unlink()
    folder = tmp_path / "bundle"
    assert bundle(mesh, folder) == 2
    assert "4 of 8 ranks have no file (1, 5, 6, 7)" in capsys.readouterr().err
    assert not folder.exists()
    assert bundle(mesh, folder, "--trim", topology="4 ranks, 10 Gbit/s, 5 us") == 0
    said = capsys.readouterr().out
    assert "the others are ranks 0 to 3" in said
    assert "2 messages to and from absent ranks run as compute" in said
    groups = json.loads((folder / "run_comm_groups.json").read_text())
    assert groups["1"] == [0, 1, 2, 3]
    assert groups["3"] == [1, 2]
    trace = et_file.read(folder / "run.3.et")
    assert trace.column("comm_src", -1).max() == 0
    assert run_astra(folder).returncode == 0


def test_missing_ranks_are_made_from_their_like(
    mesh: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (1, 6, 7):
        Path(f"{mesh}.{rank}.et").unlink()
    folder = tmp_path / "bundle"
    assert bundle(mesh, folder, "--fill") == 0
    assert (
        "3 of 8 ranks have no file (1, 6, 7) and were made from ranks of the same stage"
        in capsys.readouterr().out
    )
    assert json.loads((folder / "run_comm_groups.json").read_text()) == MESH
    for rank in (1, 6, 7):
        made, real = et_file.read(folder / f"run.{rank}.et"), step(rank)
        assert made.types.tolist() == real.types.tolist()
        for name in ("comm_src", "comm_dst", "comm_size", "comm_type"):
            assert made.column(name, -1).tolist() == real.column(name, -1).tolist(), (rank, name)
        groups = [trace.attributes["pg_name"].values for trace in (made, real)]
        texts = [[group[at] for at in range(len(group.index))] for group in groups]  # type: ignore[index]
        assert texts[0] == texts[1]
    assert run_astra(folder).returncode == 0
    for rank in (3, 5):
        Path(f"{mesh}.{rank}.et").unlink()
    assert bundle(mesh, tmp_path / "other", "--fill", "--mesh", "tp2,dp2,pp2") == 2
    assert "rank 1 can't be made: no rank with tensor-parallel place 1 and stage 0" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        ("8xH100, 4 nodes, 400 Gbit/s", "has 32 GPUs (8 × 4)"),
        ("4xH100, 2 nodes, 400", "bandwidth '400' has no unit"),
        ("4xH100, 2 nodes, 0 Gbit/s", "must be above 0"),
    ],
)
def test_a_topology_that_does_not_fit_writes_nothing(
    mesh: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], topology: str, message: str
) -> None:
    assert bundle(mesh, tmp_path / "bundle", topology=topology) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set"]


def test_a_set_that_does_not_validate_writes_nothing(
    mesh: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = Path(mesh)
    trace = step(3)
    trace.data_deps.values[0] = np.uint64(15)
    et_file.write(f"{mesh}.3.et", trace)
    assert bundle(mesh, tmp_path / "bundle") == 2
    assert "run doesn't validate" in capsys.readouterr().err
    et_file.write(f"{mesh}.3.et", step(3))
    lost = step(3)
    lost.types[10] = NodeType.COMP
    et_file.write(f"{mesh}.3.et", lost)
    assert bundle(mesh, tmp_path / "bundle") == 2
    assert "run doesn't validate" in capsys.readouterr().err
    et_file.write(f"{mesh}.3.et", step(3))
    groups = prefix.parent / "run_comm_groups.json"
    groups.write_text(json.dumps(MESH | {"9": [5, 11]}))
    assert bundle(mesh, tmp_path / "bundle") == 2
    assert "12 ranks" in capsys.readouterr().err
    groups.unlink()
    assert bundle(mesh, tmp_path / "bundle") == 2
    assert "no comm-group file" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set"]


def test_a_folder_with_other_files_is_left_alone(mesh: str, tmp_path: Path) -> None:
    folder = tmp_path / "precious"
    folder.mkdir()
    (folder / "thesis.tex").write_text("…")
    assert bundle(mesh, folder) == 2
    assert [path.name for path in folder.iterdir()] == ["thesis.tex"]
    (folder / "thesis.tex").unlink()
    assert bundle(mesh, folder) == 0
    assert bundle(mesh, folder, "--comm-only") == 0
    assert "Communication alone runs" in (folder / "README.md").read_text()


def test_validate_for_astra_sim_reads_the_bundle(
    mesh: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "bundle"
    bundle(mesh, folder)
    network = (folder / "network.yml").read_text()
    for content in (
        network.replace("4, 2", "4, 4"),
        "topology: [ Switch ]\n" + network.split("\n", 1)[1],
        network.replace("4, 2", "8").replace("Switch, Switch", "Switch"),
    ):
        (folder / "network.yml").write_text(content)
        assert main(["validate", str(folder / "run"), "--for", "astra-sim"]) == 1, content
        assert "[astra-network]" in (said := capsys.readouterr().out)
    assert "several groups of fewer than all ranks on one dimension" in said
    assert main(["validate", str(folder / "run")]) == 0
