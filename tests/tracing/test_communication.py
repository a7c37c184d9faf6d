"""Every communication of four real gloo ranks is in their graphs with its type, group, size and peer."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from chakra_et.__main__ import main
from chakra_et.et import file as et_file
from chakra_et.et.columns import CollectiveType, NodeType

WORLD = (0, 1, 2, 3)
WORKER = "tests/tracing/communication_worker.py"
Operation = tuple[str, tuple[int, ...], int]  # type, ranks of the group, bytes


def operations(path: Path, groups: dict[str, list[int]]) -> Counter[Operation]:
    trace = et_file.read(path)
    names = trace.attributes["pg_name"]
    group = dict(zip(names.rows.tolist(), (groups[str(name)] for name in names.values), strict=True))
    found: Counter[Operation] = Counter()
    for row in range(len(trace)):
        if (kind := NodeType(int(trace.types[row]))) >= NodeType.COMM_SEND:
            if kind == NodeType.COMM_COLL:
                kind = CollectiveType(int(trace.column("comm_type")[row]))
            found[kind.name, tuple(group[row]), int(trace.column("comm_size")[row])] += 1
    return found


def test_every_communication_of_four_ranks(torchrun, tmp_path):
    done = torchrun(4, WORKER, "out")
    assert done.returncode == 0, done.stdout
    assert main(["convert", str(tmp_path / "out")]) == 0
    # DDP's first step had one bucket, whose bytes one of the two had later; the other one had none.
    trace = et_file.read(tmp_path / "out" / "buckets.0.et")
    rows = trace.attributes["comm_type"].rows
    reduced = trace.column("comm_type")[rows] == CollectiveType.ALL_REDUCE
    sizes = trace.column("comm_size")[rows][reduced].tolist()
    assert sizes == 2 * [(300 * 100 + 100) * 4, (64 * 300 + 300) * 4]
    groups = json.loads((tmp_path / "out" / "all_comm_groups.json").read_text())
    known = Counter(tuple(ranks) for ranks in groups.values())
    # The pairs were made twice: by new_group and as a dimension of the mesh.
    assert known == {WORLD: 1, (0, 1): 2, (2, 3): 2, (0, 2): 1, (1, 3): 1}
    report = json.loads((tmp_path / "out" / "all_conversion.json").read_text())
    guesses = [each["id"] for rank in report["ranks"].values() for each in rank["warnings"]]
    assert not [name for name in guesses if "group" in name or "inferred" in name or "size" in name]

    trace = et_file.read(tmp_path / "out" / "all.0.et")
    received = trace.types == NodeType.COMM_RECV
    found = trace.column("comm_src")[received & (trace.column("comm_tag") == 5)].tolist()
    assert sorted(found) == [1, 2, 3] and f"received from {' '.join(map(str, found))}\n" in done.stdout

    parameters = 2 * (32 * 32 + 32) * 4  # bytes of the half of both layers that a rank has of the model
    for rank in WORLD:
        pair = (0, 1) if rank < 2 else (2, 3)
        expected: Counter[Operation] = Counter({
            ("ALL_REDUCE", pair, 64 * 32 * 4): 1,
            ("ALL_TO_ALL", pair, 8 * 4): 1,
            ("ALL_REDUCE", pair, (48 * 48 + 48) * 4): 1,  # gradients of DDP
            ("ALL_GATHER", pair, 4 * 2 * 4): 1,
            ("ALL_REDUCE", WORLD, 128 * 4): 1,
            ("SCATTER", WORLD, 16 * 4 * (4 if rank == 0 else 1)): 1,
            ("BARRIER", WORLD, 1): 1,
            ("COMM_SEND", WORLD, 256 * 4): 1,
            ("COMM_RECV", WORLD, 256 * 4): 1,
            ("ALL_REDUCE", pair, 8 * 32 * 4): 1,  # the second layer's partial sums
        })  # fmt: skip
        expected["COMM_SEND" if rank else "COMM_RECV", WORLD, 8 * 4] = 1 if rank else 3
        if "not sharded" not in done.stdout:
            across = (rank % 2, rank % 2 + 2)
            expected["ALL_GATHER", across, parameters // 2] = 1
            expected["REDUCE_SCATTER", across, parameters] = 1
        assert operations(tmp_path / "out" / f"all.{rank}.et", groups) == expected
        trace = et_file.read(tmp_path / "out" / f"all.{rank}.et")
        for kind, peer, to in (
            ("comm_dst", rank + 1, NodeType.COMM_SEND),
            ("comm_src", rank - 1, NodeType.COMM_RECV),
        ):
            tags = trace.column("comm_tag", -1)
            [row] = [row for row in range(len(trace)) if trace.types[row] == to and not tags[row]]
            assert trace.column(kind)[row] == peer % 4
