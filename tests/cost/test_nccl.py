"""NCCL's times: against measurements that the fit never saw, and by hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from benchmarks import cost_collectives
from chakra_et.cost import nccl, networks
from chakra_et.cost.collectives import collective_time, message_time
from chakra_et.cost.topology_text import read_topology
from chakra_et.errors import TraceError
from chakra_et.et.columns import CollectiveType

REDUCE, GATHER = CollectiveType.ALL_REDUCE, CollectiveType.ALL_GATHER
measured = pytest.mark.skipif(
    not (cost_collectives.GIVEN / "nccl.csv").is_file(), reason="the published measurements aren't here"
)


@pytest.fixture(scope="module")
def judged() -> Mapping[str, float]:
    """Mean relative error by row of the benchmark, over its GPUs."""
    found: dict[str, list[np.ndarray]] = {}
    for each in cost_collectives.results(cost_collectives.read(cost_collectives.GIVEN)):
        found.setdefault(each.judged, []).append(np.abs(each.errors))
    return {name: float(np.concatenate(errors).mean()) for name, errors in found.items()}


@measured
@pytest.mark.parametrize(
    ("row", "most"),
    [
        ("sizes left out, NVLink", 0.06),
        ("sizes left out, PCIe", 0.08),
        ("not in the fit, NVLink", 0.25),
        ("two measurements, NVLink", 0.10),
        ("two measurements, PCIe", 0.25),
    ],
)
def test_what_the_fit_never_saw(judged: Mapping[str, float], row: str, most: float) -> None:
    assert judged[row] < most


@measured
def test_the_table_is_what_the_fit_writes() -> None:
    for gpu, table in cost_collectives.read(cost_collectives.GIVEN).items():
        kept = networks.table()["measured"][f"{gpu} {cost_collectives.fit(table, gpu)['link']}"]
        assert {**kept, **cost_collectives.fit(table, gpu)} == kept


@pytest.mark.parametrize("gpu", ["A100", "H100", "B200", "V100", "MI300X"])
@pytest.mark.parametrize("kind", list(CollectiveType))
def test_more_bytes_take_no_less_time(gpu: str, kind: CollectiveType) -> None:
    node = nccl.node(gpu, "")
    for ranks in (2, 3, 5, 8, 16):
        times = node.time(kind, np.geomspace(1, 1e10, 60), ranks)
        assert (np.diff(times) >= -1e-6).all()
        assert times[0] > 1000


def test_counts_between_measured_ones_lie_between_them() -> None:
    node = nccl.node("H100", "NVLink")
    times = [float(node.time(REDUCE, 1024, ranks)) for ranks in (2, 3, 4, 6, 8, 16)]
    assert times == sorted(times)


def test_a_large_collective_reaches_the_links_bandwidth_and_no_more() -> None:
    for gpu in ("A100", "H100", "B200"):
        node = nccl.node(gpu, "NVLink")
        bus = nccl.bus_factor(GATHER, 8) * (1 << 29) / float(node.time(GATHER, 1 << 29, 8)) * 1e9
        link = networks.gpu(gpu, "NVLink").bandwidth
        assert 0.6 * link < bus < link


def test_the_contribution_of_a_rank_to_an_all_gather_is_a_part_of_the_buffer() -> None:
    topology = read_topology("8xH100 NVLink")
    assert topology.nccl is not None
    whole = float(topology.nccl.time(GATHER, 8 << 20, 8))
    assert collective_time(GATHER, 1 << 20, range(8), topology) == whole


def test_two_measurements_make_a_box_known() -> None:
    topology = read_topology("8xL40S PCIe, all-reduce 22 us 5 GB/s")
    assert not topology.notes
    assert collective_time(REDUCE, 512, range(8), topology) == pytest.approx(22_000, rel=0.05)
    large = collective_time(REDUCE, 1 << 29, range(8), topology)
    assert 2 * 7 / 8 * (1 << 29) / large == pytest.approx(5, rel=0.05)


def test_a_datasheet_of_pcie_says_nothing_of_collectives() -> None:
    (note,) = read_topology("8xL40S PCIe").notes
    assert "depends on the box" in note
    assert "'8xL40S PCIe, all-reduce 22 us 5 GB/s'" in note
    assert "was not measured" in read_topology("8xV100 NVLink").notes[0]
    assert not read_topology("8xH100 NVLink").notes


def test_between_nodes_by_hand() -> None:
    topology = read_topology("8xH100 NVLink, 4 nodes, 400 Gbit/s per GPU, 1 us")
    large = 1 << 32
    # A ring at the adapters' 8 · 50 GB/s, 24 of its 62 steps of all-reduce between nodes: 8 hops in 2 · 4.
    ring = 8.4 + (62 - 8) * 3.4 + 8 * 14.0 + 2 * 31 / 32 * large / 400e9 * 1e6
    assert collective_time(REDUCE, large, range(32), topology) / 1000 == pytest.approx(ring)
    # Small: a tree with LL, 2 · 7 steps within a node and 2 · log2(4) between them.
    tree = 6.8 + 14 * 0.6 + 4 * 5.0 + 2 * 1024 / 20.4e9 * 1e6
    assert collective_time(REDUCE, 1024, range(32), topology) / 1000 == pytest.approx(tree)
    assert message_time(1 << 30, 0, 8, topology) / 1000 == pytest.approx(8.4 + 14.0 + (1 << 30) / 50e9 * 1e6)
    assert message_time(1 << 30, 0, 1, topology) < message_time(1 << 30, 0, 8, topology)


def test_a_barrier_takes_what_a_small_all_reduce_does() -> None:
    for text in ("8xH100 NVLink", "8xH100 NVLink, 4 nodes, 400 Gbit/s"):
        topology = read_topology(text)
        ranks = range(topology.ranks)
        barrier = collective_time(CollectiveType.BARRIER, 1 << 30, ranks, topology)
        assert barrier == pytest.approx(collective_time(REDUCE, 8, ranks, topology), rel=0.02)


def test_a_small_collective_is_a_launch_and_its_steps() -> None:
    latency = {count: 5000.0 + 2 * (count - 1) * 800 for count in (2, 4, 8)}
    steps = {REDUCE: 14, GATHER: 7, CollectiveType.REDUCE_SCATTER: 7, CollectiveType.ALL_TO_ALL: 2}
    for kind, count in steps.items():
        assert nccl.first_bytes(kind, 8, latency) == pytest.approx(5000 + 800 * count)
    assert nccl.first_bytes(GATHER, 8, {8: 9000.0}) == 9000
    assert nccl.launch_and_step(latency) == pytest.approx((5000, 800))
    # Steps that leave nothing of a measured time to the launch: half of that time is.
    assert nccl.launch_and_step({2: 8000.0, 8: 80_000.0}) == pytest.approx((4000, 6000))


def test_tables_that_name_gpus_otherwise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = "op,gpu,nccl,num_gpus,bytes,latency_us\n"
    rows = "".join(
        f"{op},{gpu},2.30,{count},{size},{5 + count + size / 1e4}\n"
        for op in cost_collectives.OPERATIONS
        for gpu in ("H100", "gb200", "rtx_pro_6000_server", "Martian")
        for count in (2, 4, 8)
        for size in (512, 65536, 1 << 23)
    )
    table = tmp_path / "nccl.csv"
    table.write_text(head + rows)
    judged = cost_collectives.read(tmp_path)
    given = {"H100": judged["H100"], "B200": judged["gb200"], "L40S": judged["rtx_pro_6000_server"]}
    found = {(each.judged, each.gpu) for each in cost_collectives.results(given, judged)}
    assert {
        ("in the fit, NVLink", "H100"),
        ("relative in the fit, NVLink", "gb200"),
        ("two measurements, PCIe", "rtx_pro_6000_server"),
    } <= found
    said = capsys.readouterr().err
    assert "gb200 is taken for GB200" in said and "Martian is unknown, and taken to have NVLink" in said
    table.write_text(f"{head}{rows}all_reduce,H100,2.30,2,,5\nsend_recv,H100,2.30,2,512,5\n")
    assert cost_collectives.read(tmp_path) == judged
    assert "2 rows are left out" in capsys.readouterr().err
    for text, why in ((head, "has no rows"), (head.replace("bytes", "size") + rows, "lacks bytes")):
        table.write_text(text)
        with pytest.raises(TraceError, match=why):
            cost_collectives.read(tmp_path)
