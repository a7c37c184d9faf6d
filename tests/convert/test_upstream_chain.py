"""MLCommons' tools and HTA on our captures and on public traces; ./install_chakra_tools.sh installs them."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.shared import shared_path

ROOT = Path(__file__).resolve().parents[2]
WHY = "the upstream tools are not installed: ./install_chakra_tools.sh"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def table(*folders: Path) -> dict[tuple[str, str], list[str]]:
    """The rows of benchmarks/upstream_chain.py by their first two cells."""
    script = ROOT / "benchmarks" / "upstream_chain.py"
    done = subprocess.run([sys.executable, script, *folders], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    return {(row[0], row[1]): row[2:] for row in rows}


def test_converter_jsonizer_and_visualizer_take_what_we_write() -> None:
    pytest.importorskip("chakra.src.converter.converter", reason=WHY)
    pytest.importorskip("et_replay", reason=WHY)
    pytest.importorskip("graphviz", reason=WHY)
    rows = table(ROOT / "tests/fixtures/captures/torch-2.13")
    native, upstream = (rows["tiny_2gpu", by] for by in ("native", "upstream"))
    nodes, edges, absent, communication, *_ = native
    assert (absent, communication) == ("0", "6")
    # The converter knows communication by NCCL's kernels, and the host's own time not at all.
    assert upstream[3] == "0" and int(upstream[0].replace(",", "")) < int(nodes.replace(",", ""))


def test_hta_s_busy_time_is_ours(tmp_path: Path) -> None:
    pytest.importorskip("hta", reason=WHY)
    (tmp_path / "a100_alexnet.json.gz").symlink_to(
        shared_path("data/traces/public/a100_alexnet_cuda_sync.json.gz")
    )
    ((_, theirs), others) = next(row for row in table(tmp_path).items() if row[0][0] == "a100_alexnet")
    theirs, ours, events = (float(cell.split()[0]) for cell in (theirs, *others))
    assert ours == pytest.approx(events, rel=1e-3) and theirs == pytest.approx(events, rel=0.01)


def test_et_replay_parses_our_host_traces() -> None:
    parser = pytest.importorskip("et_replay.execution_trace", reason=WHY)
    path = ROOT / "tests/fixtures/captures/torch-2.13/tiny_1gpu_host.json.gz"
    document = json.loads(gzip.decompress(path.read_bytes()))
    assert len(parser.ExecutionTrace(document).nodes) == len(document["nodes"])
