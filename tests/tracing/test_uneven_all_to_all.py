"""Splits of uneven all-to-alls, as of experts with unequal numbers of tokens, from capture to report."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from chakra_et.__main__ import main
from chakra_et.convert.inputs import find_run
from chakra_et.et import file as et_file
from chakra_et.et.node_attributes import splits
from chakra_et.report.collectives import split_imbalance
from chakra_et.report.run import load
from chakra_et.validate.check import check_together

SCRIPT = """
import sys, torch, torch.distributed as dist
from chakra_et import ChakraTracer
dist.init_process_group("gloo")
sent = [[3, 5], [2, 7]]
rank = dist.get_rank()
mine, expected = sent[rank], [each[rank] for each in sent]
with ChakraTracer(sys.argv[1], "experts", wait_steps=1, warmup_steps=1, active_steps=2) as tracer:
    for _ in range(6):
        tokens, got = torch.ones(sum(mine), 4), torch.empty(sum(expected), 4)
        dist.all_to_all_single(got, tokens, expected, mine)
        tracer.step()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, repo_root: Path) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    (folder / "train.py").write_text(SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(repo_root)}
    words = [*launcher, str(folder / "train.py"), str(folder)]
    subprocess.run(words, check=True, timeout=120, env=environment)
    assert main(["convert", "--dir", str(folder)]) == 0
    return folder / "experts"


def test_splits_reach_the_files_and_agree(run: Path) -> None:
    found = {}
    for rank in (0, 1):
        trace = et_file.read(f"{run}.{rank}.et")
        found[rank] = [list(splits(trace, f"comm_{side}_split").values()) for side in ("in", "out")]
    # In each of the two steps.
    assert found == {0: [[[3, 5]] * 2, [[3, 2]] * 2], 1: [[[2, 7]] * 2, [[5, 7]] * 2]}
    assert main(["validate", str(run)]) == 0


def test_ranks_that_disagree_are_named(run: Path) -> None:
    traces = {rank: et_file.read(f"{run}.{rank}.et") for rank in (0, 1)}
    values = traces[1].attributes["comm_out_split"].values
    values.table[:] = [b"[4,7]"]
    groups = {"1": [0, 1]}
    problems = [str(each) for each in check_together(traces, groups, {0: "0.et", 1: "1.et"})]
    (found,) = [text for text in problems if "collective-splits" in text]
    assert "sends 5 rows to rank 1, which expects 4 in 1.et" in found


def test_the_report_and_the_bundle_say_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loaded = load(find_run([str(run)]))
    assert split_imbalance(loaded) == "rank 1 gets most rows, 1.41 × the mean of 2 ranks"
    words = ["-o", str(run.parent / "bundle"), "--topology", "2 ranks, 10 Gbit/s, 30 us"]
    assert main(["astra", str(run), *words]) == 0
    assert "4 all-to-alls have uneven splits" in capsys.readouterr().out
