"""Files of other tools in ours, and ours in theirs: a table of docs/SIMULATORS.md."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from chakra_et.__main__ import main
from tests.astra.sets import MESH, astra_sim, run_astra, step, write_set
from tests.astra.stg import write_stg

WHY = "mlc-chakra is not installed: ./run_tests.sh installs it"
TWO_NODES = "2xA100, 2 nodes, 200 Gbit/s, 5 us"


@pytest.fixture(scope="module")
def pb2() -> ModuleType:
    return pytest.importorskip("chakra.schema.protobuf.et_def_pb2", reason=WHY)


def test_chakra_s_own_reader_jsonizer_and_visualizer_take_a_bundle(pb2: ModuleType, tmp_path: Path) -> None:
    name = write_set(tmp_path / "set", {rank: step(rank) for rank in range(8)}, MESH)
    topology = "4xA100 NVLink, 2 nodes, 200 Gbit/s, 5 us"
    assert main(["astra", name, "-o", str(tmp_path / "bundle"), "--topology", topology]) == 0
    file = tmp_path / "bundle" / "run.0.et"
    for tool, ending in (("jsonizer", "json"), ("visualizer", "graphml")):
        flags = ["--input_filename", str(file), "--output_filename", f"{file}.{ending}"]
        module = f"chakra.src.{tool}.{tool}"
        subprocess.run([sys.executable, "-m", module, *flags], check=True, capture_output=True)
    text = Path(f"{file}.json").read_text()
    assert text.count('"type":') == 15
    graph = Path(f"{file}.graphml").read_text()
    assert graph.count("<node ") == 15 and graph.count("<edge ") >= 14


def test_a_set_of_stg_is_read_reported_and_run(
    pb2: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has operations and bytes in place of times, so that only a simulator tells how long it takes."""
    name = write_stg(pb2, tmp_path / "stg")
    assert main(["validate", name, "--for", "astra-sim"]) == 0
    said = capsys.readouterr().out
    assert "has is_cpu_op as int32_val: write it as bool_val (and 1 more) [attribute-kind-zero]" in said
    assert main(["info", f"{name}.0.et"]) == 0
    assert "COMP 3, COMM_SEND 1, COMM_COLL 1" in capsys.readouterr().out
    assert main(["predict", name]) == 0
    assert "no node has a duration: every time is 0" in capsys.readouterr().out
    assert main(["report", name, "-o", str(tmp_path / "report.html")]) == 0
    assert (tmp_path / "report.html").stat().st_size > 10_000
    folder = tmp_path / "bundle"
    assert main(["astra", name, "-o", str(folder), "--topology", TWO_NODES]) == 0
    assert json.loads((folder / "system.json").read_text())["roofline-enabled"] == 1
    astra_sim()
    assert "4 of 4 ranks finished" in run_astra(folder).stdout
    line = next(line for line in (folder / "astra.log").read_text().splitlines() if "sys[0] finished" in line)
    total, exposed = (int(word) for word in line.split() if word.isdigit())
    assert total - exposed == pytest.approx(3 * 2**33 / 312e12 * 1e9, rel=0.01)
