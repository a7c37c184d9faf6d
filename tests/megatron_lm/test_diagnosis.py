"""The first failing rank and its cause, from real error texts and from logs of several nodes.

``fixtures/errors/NAME.err`` is a log, ``NAME.cause`` what it must be found to report: where, and the
sentence. Those of torchrun, gloo, torch.save and Slurm were produced by real failures of small programs;
the others are written in the formats of PyTorch 1.13 to 2.13, NCCL, CUDA, enroot, pyxis, Lustre and the
kernel.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lm.diagnosis import failures, statements
from megatron_lm.diagnosis.failures import Log
from megatron_lm.diagnosis.statements import split
from megatron_lm.logs import runs
from megatron_lm.logs.runs import State
from tests.megatron_lm import written_logs
from tests.megatron_lm.written_logs import simple_iteration, write_node

ERRORS = Path(__file__).with_name("fixtures") / "errors"
CASES = sorted(path.stem for path in ERRORS.glob("*.err"))
HEALTHY = [name for name in CASES if name.startswith("healthy")]


def expected(name: str) -> list[str]:
    return (ERRORS / f"{name}.cause").read_text().splitlines()


def diagnosis(log: Path) -> list[str]:
    failure = failures.first([Log("n1", log, 0)], {})
    if failure is None:
        return ["none"]
    raw = log.read_text()
    assert failure.lines and all(line in raw for line in failure.lines)
    return [failure.where, failure.sentence]


@pytest.mark.parametrize("name", CASES)
def test_the_cause_of_each_text(name: str) -> None:
    assert diagnosis(ERRORS / f"{name}.err") == expected(name)


def test_colours_line_ends_and_earlier_attempts_change_nothing(tmp_path: Path) -> None:
    log = tmp_path / "n1.err"
    for name in ("rank_killed_gloo", "nccl_watchdog_timeout", "interleaved_tracebacks", "slurm_preempted"):
        text = (ERRORS / f"{name}.err").read_text()
        for form in ("\x1b[31m{}\x1b[0m\n", "{}\r\n"):
            log.write_bytes("".join(form.format(line) for line in text.splitlines()).encode())
            failure = failures.first([Log("n1", log, 0)], {})
            assert failure and [failure.where, failure.sentence] == expected(name), (name, form)
        log.write_text(f"{text}\nattempt 1 on n1 at 2026-11-22T03:00:00+0000\nall is well\n")
        assert failures.of_log(Log("n1", log)) == [], name


@settings(deadline=None)
@given(st.text(), st.binary())
def test_any_text_is_read(text: str, data: bytes) -> None:
    for content in (text, data.decode(errors="replace")):
        list(statements.read(content, datetime(2026, 11, 22)))


def test_a_line_without_its_prefixes() -> None:
    base = datetime(2026, 11, 22, 3)
    (line,) = split("[rank5]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:607] [Rank 5] Watchdog", base)
    assert (line.rank, line.level, line.when) == (5, "E", datetime(2026, 3, 21, 2, 7, 8, 408271))
    (line,) = split("01:06:38 rank 2 ERROR rank 2: can't save", base)
    assert (line.rank, line.level, line.text) == (2, "ERROR", "rank 2: can't save")
    assert line.when == datetime(2026, 11, 22, 1, 6, 38)
    (line,) = split("n1:2210:2319 [0] NCCL WARN Call to bind failed : Address already in use", base)
    assert (line.level, line.text) == ("WARN", "Call to bind failed : Address already in use")


# --- a whole run


def write_run(folder: Path, job: str, nodes: dict[str, str], batch: str = "", **states: str) -> None:
    for rank, (name, err) in enumerate(nodes.items()):
        out = f"NODE_RANK: {rank}\nNPROC_PER_NODE: 2\nSAVE: /ckpt\n\n"
        write_node(folder / job, name, out=out, err=err, state=states.get(name, "exit 143 1700000002\n"))
    (folder / f"{job}.sbatch.out").write_text(batch)


def diagnosed(folder: Path, job: str, word: str) -> failures.Failure | None:
    return failures.first_failure(runs.find((job,), folder), {job: State(word)})


PEER_GONE = (
    "[rank{rank}]: Traceback (most recent call last):\n"
    '[rank{rank}]:   File "/x/train.py", line 1, in <module>\n'
    "[rank{rank}]: RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.3]:2481\n"
    "E1121 10:00:0{second}.000000 4 torch/distributed/elastic/multiprocessing/api.py:874] failed "
    "(exitcode: 1) local_rank: {local} (pid: 5) of binary: /opt/venv/bin/python\n"
)
OUT_OF_MEMORY = (
    "[rank5]: Traceback (most recent call last):\n"
    '[rank5]:   File "/x/train.py", line 1, in <module>\n'
    "[rank5]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    "E1121 10:00:05.000000 4 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: 1) "
    "local_rank: 1 (pid: 5) of binary: /opt/venv/bin/python\n"
)
KILLED = (
    "slurmstepd: error: *** STEP 12.0 ON n1 CANCELLED AT 2026-11-21T10:00:09 ***\n"
    "srun: error: n1: task 0: Killed\n"
)


def test_the_rank_that_failed_by_itself_is_first_though_others_noticed_earlier(tmp_path: Path) -> None:
    """Ranks 0 and 2 lost a peer, and say so four seconds before rank 5's traceback is out."""
    nodes = {
        "n1": PEER_GONE.format(rank=0, local=0, second=1),
        "n2": PEER_GONE.format(rank=2, local=0, second=2),
        "n3": OUT_OF_MEMORY,
    }
    write_run(tmp_path, "12", nodes, KILLED)
    failure = diagnosed(tmp_path, "12", "FAILED")
    assert failure and failure.where == "rank 5 on n3" and "GPU ran out of memory" in failure.sentence
    assert failure.lines[-1].startswith("[rank5]: torch.OutOfMemoryError")
    assert str(failure).startswith("rank 5 on n3 failed first at 2026-11-21 10:00:05: its GPU")


def test_if_all_blame_a_peer_the_earliest_is_shown(tmp_path: Path) -> None:
    nodes = {f"n{n}": PEER_GONE.format(rank=2 * n - 2, local=0, second=9 - n) for n in (1, 2, 3)}
    write_run(tmp_path, "12", nodes)
    failure = diagnosed(tmp_path, "12", "FAILED")
    assert (
        failure
        and failure.where == "rank 4 on n3"
        and failure.sentence.startswith("its connection to another")
    )


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("CANCELLED", "job 12 was cancelled"),
        ("TIMEOUT", "job 12 reached its time limit"),
        ("PREEMPTED", "job 12 was preempted by another job"),
        ("NODE_FAIL", "a node of job 12 failed"),
        ("OUT_OF_MEMORY", "job 12 used more memory than it was given, and its processes were killed"),
    ],
)
def test_slurm_s_state_explains_what_no_log_does(tmp_path: Path, word: str, sentence: str) -> None:
    write_run(tmp_path, "12", {"n1": PEER_GONE.format(rank=0, local=0, second=1)})
    failure = diagnosed(tmp_path, "12", word)
    assert failure and str(failure) == sentence


def test_a_lost_node_is_named(tmp_path: Path) -> None:
    batch = (ERRORS / "slurm_node_failure.err").read_text()
    write_run(tmp_path, "9", {"n1": "", "n2": ""}, batch)
    failure = diagnosed(tmp_path, "9", "NODE_FAIL")
    assert failure and str(failure) == "node n2 failed at 2026-11-22 01:52:15"


def test_a_run_that_has_done_its_last_iteration_has_not_failed(tmp_path: Path) -> None:
    for name in ("healthy_warnings", "lustre_io_error"):
        write_run(tmp_path, "12", {"n1": (ERRORS / f"{name}.err").read_text()}, n1="exit 0 1700000002\n")
        with (tmp_path / "12/n1.out").open("a") as out:
            out.write(written_logs.iteration_line(simple_iteration(50)))
        assert [diagnosed(tmp_path, "12", word) for word in ("COMPLETED", "UNKNOWN")] == [None, None]


def test_a_launcher_that_was_killed_comes_before_the_ranks_that_it_ends(tmp_path: Path) -> None:
    """The ranks of n2 stop as their torchrun is gone, and blame each other."""
    stops = "10:00:0{0} rank {1} ERROR rank {1} stops: rank 3 failed: ended by SIGTERM\n"
    nodes = {"n1": stops.format(1, 0), "n2": "10:00:02 rank 3 ERROR rank 3: ended by SIGTERM\n"}
    write_run(tmp_path, "12", nodes, n1="exit 1 1700000001\n", n2="exit 137 1700000009\n")
    failure = diagnosed(tmp_path, "12", "FAILED")
    assert failure and failure.where == "node n2"
    assert failure.sentence.startswith("its launcher, torchrun: it was killed (SIGKILL)")


@pytest.mark.parametrize("name", HEALTHY)
def test_misleading_words_are_no_failure_in_any_state(tmp_path: Path, name: str) -> None:
    write_run(tmp_path, "12", {"n1": (ERRORS / f"{name}.err").read_text()}, n1="running 1\n")
    for word in ("RUNNING", "PENDING", "UNKNOWN", "FAILED"):
        assert diagnosed(tmp_path, "12", word) is None


def test_kinds_of_statements_in_one_log() -> None:
    text = (ERRORS / "nccl_watchdog_timeout.err").read_text()
    found = [statement.kind for statement in statements.read(text, datetime(2026, 11, 22))]
    assert found.count("end") == 4 and "exception" in found and "record" in found
