"""The jobs' stages, flags and refusals, with an interpreter that records what it is asked to run."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.shell.test_supervise import is_running, wait_for

SCRIPTS = [
    "run_gpt2_quick.sh",
    "run_bert_quick.sh",
    "run_gpt2.sh",
    "run_bert.sh",
    "run_all_profiling.sh",
    "run_all_experiments.sh",
    "setup_and_convert.sh",
    "install_chakra_tools.sh",
    "run_tests.sh",
]

# Stands in for the environment's Python: supervise.py runs for real, all else is recorded; training leaves
# host traces, conversion .et files. FAIL names the stage that fails, SLEEP the one that takes long.
FAKE_PYTHON = r"""#!{python} -SE
import os, pathlib, re, subprocess, sys, time
words = sys.argv[1:]
if words[0].endswith("supervise.py"):
    os.execv({python!r}, [{python!r}, "-SE", *words])
if words[0] == "-c":
    print(os.environ.get("FAKE_GPUS", "0"))
    sys.exit()
text = " ".join(words)
with open({calls!r}, "a") as calls:
    calls.write(text + "\n")
stages = r"train\.py|fix_host_traces|convert_to_et|chakra_et \w+|ruff \w+"
stages += r"|-m mypy|-m pytest"
stage = re.search(stages, text).group()
if stage == os.environ.get("SLEEP"):
    open({calls!r} + ".pid", "w").write(str(os.getpid()))
    time.sleep(300)
if stage == os.environ.get("FAIL"):
    print("the reason", file=sys.stderr)
    sys.exit(3)
def value(flag):
    return words[words.index(flag) + 1]
if stage == "train.py" and "--trace-name" in words:
    folder = pathlib.Path(value("--trace-output-dir"))
    folder.mkdir(exist_ok=True)
    for rank in range(int(value("--num-gpus"))):
        (folder / (value("--trace-name") + (f"_rank{{rank}}" if rank else "") + "_host.json")).touch()
if stage == "convert_to_et":
    for host in pathlib.Path(value("--dir")).glob("*_host.json"):
        name, _, rank = host.name.removesuffix("_host.json").partition("_rank")
        host.with_name(f"{{name}}.{{rank or 0}}.et").touch()
"""


@pytest.fixture
def project(tmp_path: Path, repo_root: Path) -> Path:
    project = tmp_path / "my project"
    shutil.copytree(repo_root / "scripts", project / "scripts")
    for script in SCRIPTS:
        shutil.copy(repo_root / script, project)
    fake = project / "python"
    fake.write_text(FAKE_PYTHON.format(python=sys.executable, calls=str(project / "calls")))
    fake.chmod(0o755)
    (project / "scripts" / "environment.py").write_text(f"print({str(fake)!r})\n")
    return project


def run(project: Path, script: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "", **env}
    return subprocess.run(
        [project / script, *arguments],
        cwd=project.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def calls(project: Path) -> list[str]:
    file = project / "calls"
    return file.read_text().splitlines() if file.exists() else []


def test_a_quick_job_goes_through_all_stages_in_order(project: Path) -> None:
    result = run(project, "run_gpt2_quick.sh", "2", "--", "--batch-size", "7")
    assert result.returncode == 0, result.stderr
    train, fix, convert, check, report = calls(project)
    outputs = f"{project}/outputs"
    name = "gpt2_2gpu_quick_trace"
    assert train.startswith("-m torch.distributed.run --standalone --nproc_per_node 2 ")
    assert f" {project}/gpt2/train.py --num-gpus 2 --max-steps 10 " in train
    assert " --batch-size 2 --max-seq-length 128 --padding max " in train
    assert " --enable-tracing --no-convert " in train, "the stages below convert"
    assert f"--trace-output-dir {outputs} --trace-name {name} " in train
    assert "--trace-wait-steps 5 --trace-warmup-steps 2 --trace-active-steps 3 " in train
    assert train.endswith(" --batch-size 7"), "flags after -- come last, so that they win"
    assert fix == f"fix_host_traces.py {outputs}/{name}_host.json {outputs}/{name}_rank1_host.json"
    assert convert == f"convert_to_et.py --dir {outputs} --name {name}"
    assert check == f"-m chakra_et validate {outputs}/{name}.0.et {outputs}/{name}.1.et"
    assert report == f"-m chakra_et report {outputs}/{name}"


@pytest.mark.parametrize("steps, schedule", [("1", (0, 0)), ("2", (0, 1)), ("3", (0, 1)), ("100", (5, 2))])
def test_the_trace_fits_into_any_number_of_steps(
    project: Path, steps: str, schedule: tuple[int, int]
) -> None:
    assert run(project, "run_bert_quick.sh", "1", steps).returncode == 0
    wait_steps, warmup = schedule
    assert (
        f"--trace-wait-steps {wait_steps} --trace-warmup-steps {warmup} --trace-active" in calls(project)[0]
    )
    assert "--trace-name bert_1gpu_quick_trace " in calls(project)[0]


def test_gpus_get_longer_sequences(project: Path) -> None:
    assert run(project, "run_gpt2_quick.sh", "4", FAKE_GPUS="4").returncode == 0
    assert "--batch-size 4 --max-seq-length 512 --padding max" in calls(project)[0]


@pytest.mark.parametrize("script", ["run_gpt2_quick.sh", "run_bert.sh"])
def test_more_gpus_than_there_are_is_refused_before_anything_runs(project: Path, script: str) -> None:
    result = run(project, script, "4", FAKE_GPUS="2")
    assert result.returncode == 1
    assert f"{script}: 4 GPUs asked for, 2 here" in result.stderr
    assert calls(project) == []
    assert run(project, script, "4", "--cpu", FAKE_GPUS="2").returncode == 0


def test_the_output_folder_is_the_callers(project: Path) -> None:
    assert run(project, "run_gpt2_quick.sh", "--output-dir", "my traces").returncode == 0
    assert (project.parent / "my traces" / "gpt2_1gpu_quick_trace.0.et").exists()


@pytest.mark.parametrize(
    "stage, name, ran",
    [
        ("train.py", "training gpt2 on 1 CPU process(es)", 1),
        ("fix_host_traces", "repairing host traces", 2),
        ("convert_to_et", "converting", 3),
        ("chakra_et validate", "checking", 4),
        ("chakra_et report", "reporting", 5),
    ],
)
def test_a_failing_stage_ends_the_job_with_its_status_and_a_sentence(
    project: Path, stage: str, name: str, ran: int
) -> None:
    result = run(project, "run_gpt2_quick.sh", FAIL=stage)
    assert result.returncode == 3
    said = f"run_gpt2_quick.sh: {name} failed (exit status 3): the lines above say why"
    assert result.stderr.splitlines() == ["the reason", said]
    assert len(calls(project)) == ran


def test_several_machines_pass_through_to_torchrun(project: Path) -> None:
    flags = ("--nnodes=2", "--node_rank", "1", "--master-addr", "head", "--master_port=29511")
    result = run(project, "run_gpt2_quick.sh", "4", *flags, FAKE_GPUS="4")
    assert result.returncode == 0, result.stderr
    (train,) = calls(project)
    assert "--nnodes 2 --node_rank 1 --master_addr head --master_port 29511 --nproc_per_node 4 " in train
    assert "--num-gpus 8 " in train
    assert "--trace-name gpt2_8gpu_quick_trace " in train
    assert "node 1 is done; node 0 converts" in result.stdout


def test_a_full_job_trains_with_the_batch_size_and_leaves_a_trace(project: Path) -> None:
    """Training itself converts it at the end."""
    assert run(project, "run_bert.sh", "2", "16", "--", "--bf16").returncode == 0
    (train,) = calls(project)
    tracing = f"--enable-tracing --trace-output-dir {project}/outputs"
    assert train.endswith(f"{project}/bert/train.py --num-gpus 2 --batch-size 16 {tracing} --bf16")


def test_several_machines_meet_at_the_known_port(project: Path) -> None:
    flags = ("--nnodes", "2", "--master-addr", "head")
    assert run(project, "run_gpt2.sh", "4", *flags, FAKE_GPUS="4", MASTER_PORT="").returncode == 0
    assert "--master_addr head --master_port 6787 " in calls(project)[0]


@pytest.fixture
def sweep(project: Path) -> Path:
    """The project with single jobs that only record their arguments; one that has FAIL in them fails."""
    for script in ("run_gpt2_quick.sh", "run_bert_quick.sh", "run_gpt2.sh", "run_bert.sh"):
        record = f'echo "${{0##*/}} $*" >>"{project}/calls"'
        (project / script).write_text(
            f'#!/bin/sh\n{record}\ncase "$0 $*" in *"${{FAIL:-none}}"*) exit 3 ;; esac\n'
        )
    return project


def test_a_quick_job_without_a_number_of_gpus_takes_1_2_and_4(project: Path) -> None:
    result = run(project, "run_gpt2_quick.sh", "--output-dir", "here", "--", "--trace-gzip", FAKE_GPUS="3")
    assert result.returncode == 0, result.stderr
    trained = [call for call in calls(project) if "train.py" in call]
    assert [call.split("--num-gpus ")[1][0] for call in trained] == ["1", "2"]
    assert all(call.endswith(" --trace-gzip") for call in trained)
    assert "finished: gpt2×1 gpt2×2" in result.stdout
    assert "not run, as PyTorch sees 3 GPUs here: gpt2×4" in result.stdout
    assert (project.parent / "here" / "gpt2_2gpu_quick_trace.1.et").exists()


def test_a_quick_job_on_the_cpu_takes_1_process_and_names_the_others(project: Path) -> None:
    result = run(project, "run_bert_quick.sh")
    assert result.returncode == 0, result.stderr
    assert [call for call in calls(project) if "--num-gpus 1 " in call] == calls(project)[:1]
    assert "For 2 or 4: ./run_bert_quick.sh 2, ./run_bert_quick.sh 4" in result.stdout
    result = run(project, "run_bert_quick.sh", "--cpu", FAKE_GPUS="4")
    assert "For 2 or 4: ./run_bert_quick.sh --cpu 2," in result.stdout


def quick_jobs(*counts: int, more: str = "") -> list[str]:
    return [f"run_{model}_quick.sh {more}{count} 10" for model in ("gpt2", "bert") for count in counts]


def test_all_profiling_runs_what_the_gpus_allow_and_names_the_rest(sweep: Path) -> None:
    result = run(sweep, "run_all_profiling.sh", FAKE_GPUS="2")
    assert result.returncode == 0, result.stderr
    assert calls(sweep) == quick_jobs(1, 2, more=f"--output-dir {sweep}/outputs ")
    assert "not run, as PyTorch sees 2 GPUs here: gpt2×4 bert×4" in result.stdout


def test_all_profiling_goes_to_8_where_there_are_8(sweep: Path) -> None:
    assert run(sweep, "run_all_profiling.sh", FAKE_GPUS="8").returncode == 0
    assert calls(sweep) == quick_jobs(1, 2, 4, 8, more=f"--output-dir {sweep}/outputs ")


def test_all_profiling_without_a_gpu_points_to_cpu(sweep: Path) -> None:
    result = run(sweep, "run_all_profiling.sh")
    assert result.returncode == 1
    assert "--cpu" in result.stderr
    assert calls(sweep) == []
    result = run(sweep, "run_all_profiling.sh", "--cpu", "3", "--", "--model-name", "tiny")
    assert result.returncode == 0, result.stderr
    assert len(calls(sweep)) == 6
    assert calls(sweep)[5] == f"run_bert_quick.sh --cpu --output-dir {sweep}/outputs 4 3 -- --model-name tiny"


def test_a_failed_run_does_not_stop_the_others_but_counts(sweep: Path) -> None:
    result = run(
        sweep, "run_all_profiling.sh", "--cpu", FAIL=f"gpt2_quick.sh --cpu --output-dir {sweep}/outputs 2"
    )
    assert result.returncode == 1
    assert "finished: gpt2×1 gpt2×4 bert×1 bert×2 bert×4" in result.stdout
    assert result.stderr.splitlines()[-1] == "run_all_profiling.sh: failed: gpt2×2"


def test_all_experiments_keep_their_checkpoints_apart(sweep: Path) -> None:
    result = run(sweep, "run_all_experiments.sh", "4", FAKE_GPUS="2")
    assert result.returncode == 0, result.stderr
    assert len(calls(sweep)) == 4
    assert (
        calls(sweep)[1]
        == f"run_gpt2.sh --output-dir {sweep}/outputs 2 4 -- --save-dir {sweep}/checkpoints/gpt2_2gpu"
    )
    assert "not run, as PyTorch sees 2 GPUs here: gpt2×8 bert×8" in result.stdout


def test_a_sweep_of_real_jobs_passes_its_options_down(project: Path) -> None:
    options = ("--cpu", "1", "--output-dir", "here", "--", "--model-name", "tiny")
    (project / "run_bert_quick.sh").write_text("#!/bin/sh\n")
    result = run(project, "run_all_profiling.sh", *options)
    assert result.returncode == 0, result.stderr
    trained = [call for call in calls(project) if "train.py" in call]
    assert ["--num-gpus 4" in call for call in trained] == [False, False, True]
    assert all(call.endswith(" --model-name tiny") for call in trained)
    assert (project.parent / "here" / "gpt2_4gpu_quick_trace.3.et").exists()


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_sweep_ends_its_running_job(project: Path, number: int, status: int) -> None:
    process = subprocess.Popen(
        [project / "run_all_profiling.sh", "--cpu"],
        env={**os.environ, "SLEEP": "train.py"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    pid_file = project / "calls.pid"
    wait_for(lambda: pid_file.exists() and bool(pid_file.read_text()))
    time.sleep(0.1)
    process.send_signal(number)
    assert process.wait(30) == status
    wait_for(lambda: not is_running(int(pid_file.read_text())), 5)
    assert len(calls(project)) == 1, "the next job of the sweep must not start"


def test_conversion_alone_repairs_converts_checks_and_lists(project: Path) -> None:
    folder = project.parent / "copied"
    folder.mkdir()
    for name in ("a_host.json", "a_rank1_host.json", "b_host.json"):
        (folder / name).touch()
    (folder / "a.et").touch()
    result = run(project, "setup_and_convert.sh", "copied")
    assert result.returncode == 0, result.stderr
    assert calls(project) == [
        f"fix_host_traces.py --dir {folder}",
        f"convert_to_et.py --dir {folder} --engine native",
        f"-m chakra_et validate {folder}/a.0.et {folder}/a.1.et {folder}/b.0.et",
    ]
    assert "b.0.et" in result.stdout


def test_conversion_alone_goes_on_after_a_problem_and_says_so(project: Path) -> None:
    folder = project.parent / "copied"
    folder.mkdir()
    (folder / "a_host.json").touch()
    result = run(project, "setup_and_convert.sh", str(folder), FAIL="fix_host_traces")
    assert result.returncode == 1
    assert (
        result.stderr.splitlines()[-1] == "setup_and_convert.sh: not everything went well, see above: repair"
    )
    assert "a.0.et" in result.stdout
    (folder / "a_host.json").unlink()
    (folder / "a.0.et").unlink()
    result = run(project, "setup_and_convert.sh", str(folder))
    assert result.returncode == 1
    assert "no .et file came out of" in result.stderr


@pytest.mark.parametrize(
    "fail, status, said",
    [
        ("none", 0, "et_replay: installed"),
        ("github.com", 1, "et_replay could not be installed, so chakra_trace_link does not run"),
    ],
)
def test_upstream_tools_that_cannot_be_had_are_named(
    project: Path, fail: str, status: int, said: str
) -> None:
    installer = project / "scripts" / "environment.py"
    python = project / "venv" / "bin" / "python"
    pin = "et_replay @ https://github.com/x/param/archive/7b19.zip#subdirectory=et_replay"
    installer.write_text(
        f"import os, sys\nopen({str(project / 'calls')!r}, 'a').write(' '.join(sys.argv[1:]) + '\\n')\n"
        f"print({{'mlcommons': {str(python)!r}, 'list': {pin!r}}}.get(sys.argv[1], ''))\n"
        "sys.exit(any(os.environ['FAIL'] in word for word in sys.argv))\n"
    )
    python.parent.mkdir(parents=True)
    python.write_text(
        '#!/bin/sh\ncase "$1 $3" in\n  "-m install") case "$*" in *"$FAIL"*) exit 1 ;; esac ;;\n'
        '  "-c ") exit 1 ;;\n  *) exec ' + f"{Path(sys.executable).resolve()}" + ' "$@" ;;\nesac\n'
    )
    python.chmod(0o755)
    result = run(project, "install_chakra_tools.sh", FAIL=fail)
    assert result.returncode == status
    assert said in result.stdout + result.stderr
    assert calls(project) == ["mlcommons", "list et-replay"]
    result = run(project, "setup_and_convert.sh", str(project), "--engine", "mlcommons", FAIL=fail)
    assert (said in result.stdout + result.stderr) and (result.returncode == status or status == 0)


def test_tests_run_even_if_the_style_is_at_fault(project: Path) -> None:
    result = run(project, "run_tests.sh", "--slow", "-k", "a or b", FAIL="ruff format")
    assert calls(project) == [
        "-m ruff check .",
        "-m ruff format --check .",
        "-m mypy",
        "-m pytest -n logical --dist loadfile --slow -k a or b",
    ]
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("run_tests.sh: faults found by ruff format: ")
    assert run(project, "run_tests.sh").returncode == 0
    assert calls(project)[-1] == "-m pytest -n logical --dist loadfile"
