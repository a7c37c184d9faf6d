"""Converting on a Dask cluster: the same bytes, and workers that die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from chakra_et.__main__ import main
from chakra_et.convert.pair import PairOptions
from chakra_et.convert.runs import RunOptions, convert_sets
from chakra_et.errors import TraceError
from chakra_et.ranks.cluster import jobs_on
from chakra_et.traces import sets as trace_sets
from tests.ports import free_port

distributed = pytest.importorskip("distributed", reason="from a clone, pip install '.[cluster]'")
RANKS = 4
ROOT = Path(__file__).resolve().parents[2]


Contents = Callable[[Path], dict[str, bytes]]


def test_a_cluster_writes_the_same_bytes(traces: Path, tmp_path: Path, contents: Contents) -> None:
    (traces / "run_rank2.json").write_text("{}")
    statuses = []
    for place, flags in {"here": [], "there": ["--cluster", "local", "--workers", "2"]}.items():
        output = str(tmp_path / place)
        statuses.append(main(["convert", str(traces), "-o", output, "--skeletons", "on", *flags]))
    assert statuses == [1, 1], "one rank fails, and is a row"
    here, there = contents(tmp_path / "here"), contents(tmp_path / "there")
    assert here == there
    assert "run.3.et" in here and "run.3.skeleton.parquet" in here and "run.2.et" not in here


def test_what_reads_ranks_answers_the_same(
    traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(tmp_path / "run")
    assert main(["convert", str(traces), "-o", str(tmp_path)]) == 0
    for words in (
        ["validate", run], ["stragglers", run], ["stragglers", run, "--skeletons", "on"],
    ):  # fmt: skip
        capsys.readouterr()
        answers = []
        for flags in ([], ["--cluster", "local"]):
            assert main([*words, "--json", *flags]) == 0
            answers.append(capsys.readouterr().out)
        assert answers[0] == answers[1] and answers[0]
    assert main(["convert", str(traces), "-o", str(tmp_path), "--skeletons", "on"]) == 0
    pages = []
    for flags in ([], ["--cluster", "local"]):
        page = tmp_path / "page.html"
        assert main(["report", run, "--skeletons", "on", "-o", str(page), *flags]) == 0
        pages.append(page.read_bytes())
    assert pages[0] == pages[1]


def test_what_dies_is_a_row() -> None:
    with jobs_on("local", 2) as run:
        found = dict(run(signal.raise_signal, [0, signal.SIGKILL, 0], 2))
        error = found.pop(1)
        assert found == {0: None, 2: None}
        assert isinstance(error, TraceError) and "was killed" in str(error)


def test_a_killed_worker_costs_no_rank() -> None:
    local = distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None)
    with local as cluster, jobs_on(cluster.scheduler_address, 2) as run:
        outcomes = run(time.sleep, [0.2] * 6, 2)
        found = dict([next(outcomes)])
        os.kill(cluster.workers[0].process.pid, signal.SIGKILL)
        found |= dict(outcomes)
    assert found == dict.fromkeys(range(6))


def test_a_scheduler_of_the_user_is_used(traces: Path, tmp_path: Path) -> None:
    with distributed.LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None) as cluster:
        options = RunOptions(cluster=cluster.scheduler_address)
        (result,) = convert_sets(trace_sets.find(traces, "*", tmp_path), PairOptions(), options)
    assert not result.failed and len(result.good) == RANKS


@pytest.mark.slow
def test_a_scheduler_that_restarts_costs_its_tasks_and_no_more(
    traces: Path, tmp_path: Path, contents: Contents
) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    started: list[subprocess.Popen] = []

    def start(*words: str) -> subprocess.Popen:
        started.append(subprocess.Popen([sys.executable, "-m", f"distributed.cli.{words[0]}", *words[1:]]))
        return started[-1]

    def scheduler() -> subprocess.Popen:
        return start("dask_scheduler", "--no-dashboard", *("--host", "127.0.0.1"), "--port", address[-5:])

    words = ["convert", str(traces), "-o", str(tmp_path / "there"), "--cluster", address]
    try:
        first = scheduler()
        converting = subprocess.Popen(
            [sys.executable, "-m", "chakra_et", *words],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=-2,
            text=True,
        )
        with distributed.Client(address, timeout="120s") as client:
            while client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.tasks)) < RANKS:
                assert converting.poll() is None
                time.sleep(0.2)  # then it waits for a worker
        first.kill()
        first.wait()
        said, _ = converting.communicate(timeout=120)
        assert converting.returncode == 1 and said.count("the cluster lost it") == RANKS, said
        scheduler()
        start("dask_worker", address, "--nthreads", "1", "--no-dashboard")
        assert main(words) == 0
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert main(["convert", str(traces), "-o", str(tmp_path / "here")]) == 0
    assert contents(tmp_path / "here") == contents(tmp_path / "there")


def test_what_is_missing_is_named(
    traces: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(traces), "--cluster", "kubernetes"]) == 2
    assert "give local, slurm, or tcp://" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(TraceError, match="cluster"), jobs_on("local", 1):
        pass
