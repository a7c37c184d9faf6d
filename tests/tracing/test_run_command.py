"""``chakra-et run``: scripts that know nothing of the tracer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from trace_reading import load

from chakra_et.capture.check import inspect_pair
from chakra_et.capture.config import config_from_environment

Done = subprocess.CompletedProcess[str]
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
from helper import width

model = torch.nn.Linear(width, width)
if "RANK" in os.environ:
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model)
other = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
for step in range(int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.ones(2, width)).relu().sum().backward()
    optimizer.step()
    scheduler.step()
    other.step()
    if step == 5 and "fail" in sys.argv:
        raise OSError("the data is on fire")
print("arguments", sys.argv[1:], __name__, __file__)
if "exit" in sys.argv:
    sys.exit(7)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text(SCRIPT)
    (tmp_path / "code" / "helper.py").write_text("width = 4\n")
    return tmp_path


def run(
    folder: Path, *words: str, python: tuple[str, ...] = (), **variables: str
) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *python, "-m", "chakra_et", "run", *words],
        cwd=folder, env=environment | variables, capture_output=True, text=True, timeout=180,
    )  # fmt: skip


def test_a_script_is_traced_as_it_is(project: Path) -> None:
    done = run(
        project, "code/train.py", "8", "--flag", CHAKRA_TRACE="outputs/my_run", CHAKRA_TRACE_ACTIVE="2"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "arguments ['8', '--flag'] __main__ code/train.py\n"
    host, device = (project / "outputs" / f"my_run_{side}.json" for side in ("host", "device"))
    assert inspect_pair(host, device, 2).problems == []
    nodes = load(host)["nodes"]
    names = [node["name"] for node in nodes]
    # The annotation of the optimizer is whole, and that of the other one is no step.
    assert names.count("Optimizer.step#AdamW.step") == names.count("aten::relu") == 1
    ids = {node["id"] for node in nodes}
    assert all(node["ctrl_deps"] in ids for node in nodes)
    manifest = load(project / "outputs" / "my_run_manifest.json")
    assert manifest["complete"] and manifest["run"] == {"command": ["code/train.py", "8", "--flag"]}
    assert "chakra-et: next: " in done.stderr


def test_a_module_under_torchrun(project: Path) -> None:
    (project / "code" / "__init__.py").touch()
    text = (project / "code" / "train.py").read_text()
    (project / "code" / "train.py").write_text(text.replace("from helper", "from code.helper"))
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    done = run(project, "-m", "code.train", "8", python=launch, CHAKRA_TRACE="my_run", CHAKRA_TRACE_WAIT="0")
    assert done.returncode == 0, done.stderr
    manifest = load(project / "my_run_manifest.json")
    assert manifest["complete"] and (manifest["world_size"], manifest["backend"]) == (2, "gloo")
    for rank in ("", "_rank1"):
        assert (
            inspect_pair(
                project / f"my_run{rank}_host.json", project / f"my_run{rank}_device.json", 3
            ).problems
            == []
        )
    assert done.stderr.count("chakra-et: next: ") == 1


def test_a_script_that_fails_shows_its_own_traceback_and_keeps_its_trace(project: Path) -> None:
    done = run(project, "code/train.py", "9", "fail", CHAKRA_TRACE="outputs/t")
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if not line.startswith(("chakra-et: ", "[W"))]
    assert lines[0] == "Traceback (most recent call last):" and lines[-1] == "OSError: the data is on fire"
    assert "runpy" not in done.stderr and "chakra_et/" not in done.stderr
    reason = load(project / "outputs" / "t_manifest.json")["reason"]
    assert reason == "rank 0: training ended after 2 of 3 active steps (OSError: the data is on fire)"


def test_the_scripts_status_is_kept(project: Path) -> None:
    done = run(project, "code/train.py", "8", "exit", CHAKRA_TRACE="outputs/t")
    assert done.returncode == 7
    assert load(project / "outputs" / "t_manifest.json")["complete"]


def test_an_optimizer_that_steps_in_a_compiled_function_is_traced(project: Path) -> None:
    """Dynamo traced through the tracer, which gave up; the status was 0."""
    text = (project / "code" / "train.py").read_text()
    text = text.replace(
        "for step in", "step_compiled = torch.compile(lambda: optimizer.step(), backend='eager')\nfor step in"
    )
    (project / "code" / "train.py").write_text(
        text.replace("    optimizer.step()\n", "    step_compiled()\n")
    )
    done = run(project, "code/train.py", "8", CHAKRA_TRACE="outputs/t")
    assert done.returncode == 0 and "can't be linked" not in done.stderr, done.stderr
    (rank,) = load(project / "outputs" / "t_manifest.json")["ranks"]
    assert rank["steps"] == [3, 4, 5] and rank["check"]["linkable"]


def test_a_tracer_that_fails_ends_with_a_status_and_offers_no_conversion(project: Path) -> None:
    done = run(project, "code/train.py", "8", CHAKRA_TRACE="code/train.py/t")  # a folder within a file
    assert done.returncode == 1 and "next:" not in done.stderr
    assert "can't be written" in done.stderr and "no trace was written: no step was recorded" in done.stderr


def test_that_secrets_were_left_out_is_said_once(project: Path) -> None:
    done = run(
        project, "code/train.py", "8", "--token", "hf_abcdefghijklmnopqrstuvwx", CHAKRA_TRACE="outputs/t"
    )
    assert done.stderr.count("secrets were left out") == 1
    assert "hf_abc" not in (project / "outputs" / "t_manifest.json").read_text()


def test_a_script_that_gives_nothing_to_record_ends_with_a_status_and_a_remedy(project: Path) -> None:
    (project / "code" / "train.py").write_text("print('hello')\n")
    done = run(project, "code/train.py", CHAKRA_TRACE="outputs/t")
    assert (done.returncode, done.stdout) == (1, "hello\n")
    said = "chakra-et: no trace was written: no optimizer stepped, no module ran without gradients; name"
    assert done.stderr.startswith(said) and len(done.stderr.splitlines()) == 1


INFERENCE = """
import torch

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.ReLU()))
with torch.inference_mode():
    for _ in range(5):
        model(torch.ones(2, 4))
"""


@pytest.mark.parametrize(
    ("words", "steps"), [pytest.param((), [3], marks=pytest.mark.slow), (("--step-on", "ReLU"), [3])]
)
def test_inference_is_traced_by_the_calls_of_a_module(words, steps, project: Path) -> None:
    (project / "code" / "serve.py").write_text(INFERENCE)
    done = run(project, *words, "code/serve.py", CHAKRA_TRACE="outputs/t", CHAKRA_TRACE_ACTIVE="1")
    assert done.returncode == 0, done.stderr
    (rank,) = load(project / "outputs" / "t_manifest.json")["ranks"]
    assert rank["steps"] == steps and rank["check"]["linkable"]
    names = [node["name"] for node in load(project / "outputs" / "t_host.json")["nodes"]]
    assert names.count("aten::linear") == names.count("aten::relu") == 1


TRACED = """
import torch

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.ReLU()))
with torch.no_grad():
    torch.jit.trace(model, torch.ones(2, 4), check_trace=False)
    for strict in (False, True):
        torch.export.export(model, (torch.ones(2, 4),), strict=strict)
    for _ in range(5):
        model(torch.ones(2, 4))
"""


def test_calls_that_are_only_traced_by_jit_or_export_are_no_steps(project: Path) -> None:
    """The recording began within torch.jit.trace: no trace, and a segmentation fault at the end; within
    torch.export the script ended with an error, with its strict one for the hooks of all modules."""
    (project / "code" / "serve.py").write_text(TRACED)
    done = run(project, "code/serve.py", CHAKRA_TRACE="outputs/t", CHAKRA_TRACE_ACTIVE="1")
    assert done.returncode == 0, done.stderr
    (rank,) = load(project / "outputs" / "t_manifest.json")["ranks"]
    assert rank["steps"] == [3] and rank["check"]["linkable"]


SPAWNING = """
import os, sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def train(rank, port):
    store = dist.TCPStore("localhost", port, 2, rank == 0)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(7):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    dist.destroy_process_group()

if __name__ == "__main__":
    import socket
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    mp.spawn(train, (port,), nprocs=2)
"""


SUBCLASS = """
class Worker(mp.get_context("START").Process):
    def __init__(self, *values):
        super().__init__()
        self.values = values

    def run(self):
        train(*self.values)

if __name__"""


@pytest.mark.parametrize(
    "subclass", ["", *(pytest.param(start, marks=pytest.mark.slow) for start in ("spawn", "fork"))]
)
def test_processes_that_the_script_spawns_are_followed(project: Path, subclass: str) -> None:
    script = SPAWNING
    if subclass:
        work = "workers = [Worker(rank, port) for rank in range(2)]"
        calls = [f"[each.{call}() for each in workers]" for call in ("start", "join")]
        script = script.replace("mp.spawn(train, (port,), nprocs=2)", "\n    ".join([work, *calls]))
        script = script.replace("if __name__", SUBCLASS.lstrip().replace("START", subclass), 1)
    (project / "code" / "spawn.py").write_text(script)
    done = run(project, "code/spawn.py", CHAKRA_TRACE="outputs/t", CHAKRA_TRACE_ACTIVE="2")
    assert done.returncode == 0, done.stderr
    manifest = load(project / "outputs" / "t_manifest.json")
    assert (manifest["complete"], manifest["world_size"]) == (True, 2), done.stderr
    assert "another" not in done.stderr


def test_a_process_that_is_forked_while_recording_leaves_the_trace_alone(project: Path) -> None:
    """Its os._exit, with which each worker of a data loader ends, finished its parent's recording."""
    fork = "[os._exit(0) if os.fork() == 0 else os.wait()]"
    script = SCRIPT.replace('raise OSError("the data is on fire")', fork).replace("step == 5", "step == 4")
    (project / "code" / "train.py").write_text(script)
    done = run(project, "code/train.py", "9", "fail", CHAKRA_TRACE="outputs/t")
    assert done.returncode == 0, done.stderr
    manifest = load(project / "outputs" / "t_manifest.json")
    assert manifest["complete"] and manifest["ranks"][0]["steps"] == [3, 4, 5]


def test_a_module_that_is_called_before_the_training_is_no_step(project: Path) -> None:
    """Initializing lazy modules by a call without gradients left a run without a trace."""
    call = "with torch.no_grad():\n    model(torch.ones(2, width))\nother ="
    script = (project / "code" / "train.py").read_text().replace("other =", call, 1)
    (project / "code" / "train.py").write_text(script)
    done = run(project, "code/train.py", "9", CHAKRA_TRACE="outputs/t")
    assert done.returncode == 0, done.stderr
    names = [node["name"] for node in load(project / "outputs" / "t_host.json")["nodes"]]
    assert load(project / "outputs" / "t_manifest.json")["complete"] and "aten::relu" in names


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("os._exit(3)", 3),
        ("os.kill(os.getpid(), signal.SIGTERM)", 143),
        pytest.param("os.kill(os.getpid(), signal.SIGHUP)", 129, marks=pytest.mark.slow),
    ],
)
def test_a_script_that_is_ended_keeps_what_was_recorded(end: str, status: int, project: Path) -> None:
    script = SCRIPT.replace('raise OSError("the data is on fire")', end).replace(
        "import os,", "import signal, os,"
    )
    (project / "code" / "train.py").write_text(script)
    done = run(project, "code/train.py", "9", "fail", CHAKRA_TRACE="outputs/t")
    assert done.returncode == status, done.stderr
    manifest = load(project / "outputs" / "t_manifest.json")
    assert manifest["reason"].startswith("rank 0: training ended after 2 of 3 active steps (SystemExit")
    assert (
        inspect_pair(project / "outputs" / "t_host.json", project / "outputs" / "t_device.json", 3).problems
        == []
    )


@pytest.mark.parametrize(
    ("words", "variables", "said"),
    [
        (["code/train.py"], {"CHAKRA_TRACE": ""}, "error: CHAKRA_TRACE is not set: give FOLDER/NAME"),
        (
            ["code/train.py"],
            {"CHAKRA_TRACE": "a/"},
            "error: CHAKRA_TRACE=a/: has no name for the trace files",
        ),
        (["code/train.py"], {"CHAKRA_TRACE": "a/b*"}, "error: trace name 'b*' contains '*': use letters"),
        (
            ["nowhere.py"],
            {"CHAKRA_TRACE": "a/b"},
            "error: nowhere.py: no such script; give a Python file, or -m",
        ),
        (
            ["x.py"],
            {"CHAKRA_TRACE": "a", "CHAKRA_TRACE_ACTIVE": "0"},
            "error: CHAKRA_TRACE_ACTIVE=0: must be a",
        ),
        (
            ["x.py"],
            {"CHAKRA_TRACE": "a", "CHAKRA_TRACE_WAIT": "two"},
            "error: CHAKRA_TRACE_WAIT=two: must be a",
        ),
    ],
)
def test_bad_arguments_are_one_sentence(words, variables, said, project: Path) -> None:
    done = run(project, *words, **variables)
    assert done.returncode == 2
    assert done.stderr.startswith(said) and len(done.stderr.splitlines()) == 1


def test_variables_set_every_field() -> None:
    config = config_from_environment(
        {
            "CHAKRA_TRACE": "a/b/c",
            "CHAKRA_TRACE_WAIT": "5",
            "CHAKRA_TRACE_WARMUP": "0",
            "CHAKRA_TRACE_ACTIVE": "1",
            "CHAKRA_TRACE_GZIP": "1",
            "CHAKRA_TRACE_MEMORY": "0",
        }
    )
    assert (config.trace_output_dir, config.trace_name) == ("a/b", "c")
    assert (config.trace_wait_steps, config.trace_warmup_steps, config.trace_active_steps) == (5, 0, 1)
    assert config.trace_gzip is True and config.trace_memory is False


def test_help_lists_the_variables(project: Path) -> None:
    done = run(project, "--help")
    assert done.returncode == 0 and "CHAKRA_TRACE_WARMUP  steps with" in done.stdout
