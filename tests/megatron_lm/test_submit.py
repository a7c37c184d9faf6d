"""Submission: what would be given to sbatch, and runs on this machine."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_lm.logs import records
from tests.megatron_lm.conftest import REPO_ROOT, Script, put_tool
from tests.megatron_lm.processes import processes_with, wait_for


def header(script_text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script_text.splitlines() if line.startswith("#SBATCH ")]


def test_a_homogeneous_run_is_one_job_with_its_headers_from_the_settings(
    script: Script, tmp_path: Path
) -> None:
    done = script("_03_submit.sh", "--dry-run", MODEL="small", SLURM_QUEUE="gpu", CPUS_PER_TASK="12")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert (
        lines[0] == "#!/usr/bin/env bash" and lines[-1] == f"exec {tmp_path}/repo/megatron_lm/_02_homo_job.sh"
    )
    assert header(done.stdout) == [
        "--job-name=gpt2_small",
        "--nodes=8",
        "--partition=gpu",
        "--gres=gpu:4",
        "--ntasks-per-node=1",
        "--cpus-per-task=12",
        f"--output={tmp_path}/log2/%j.sbatch.out",
    ]
    # The script brings its settings along: an edit of _00_conf.sh does not change a waiting job.
    assert "export MEGATRON_MODEL=small" in lines and "export MEGATRON_MASTER_GRES=gpu:4" in lines
    assert not (tmp_path / "log2").exists()


def test_without_gres_and_queue_there_are_no_such_headers(script: Script) -> None:
    shown = script("_03_submit.sh", "--dry-run", GRES="").stdout
    assert not any(option.startswith(("--gres", "--partition")) for option in header(shown))


HETERO = {"HOMOGENEOUS_CLUSTER": "false", "MODEL": "xl", "MASTER_QUEUE": "a100", "SLAVE_QUEUE": "a10"}


def test_a_heterogeneous_run_is_two_jobs_with_their_own_gres_and_queue(script: Script) -> None:
    gres = {"MASTER_GRES": "gpu:a100:4", "SLAVE_GRES": "gpu:a10:4"}
    shown = script("_03_submit.sh", "--dry_run", **HETERO, **gres).stdout
    master, slave = shown.split("#!/usr/bin/env bash\n")[1:]
    assert {"--nodes=1", "--partition=a100", "--gres=gpu:a100:4"} <= set(header(master))
    assert {"--nodes=7", "--partition=a10", "--gres=gpu:a10:4"} <= set(header(slave))
    assert "_02_hetero_master_job.sh" in master and "_02_hetero_slave_job.sh" in slave


def test_het_is_one_script_of_two_parts(script: Script) -> None:
    shown = script("_03_submit.sh", "--het", "--dry-run", **HETERO).stdout
    first, second = shown.split("#SBATCH hetjob\n")
    assert "--nodes=1" in first and "--nodes=7" in second
    assert shown.count("#!/usr/bin/env bash") == shown.count("exec ") == 1


def test_options_of_sbatch_come_from_settings_then_the_body_then_the_command_line(
    script: Script, checkout: Path
) -> None:
    body = checkout / "megatron_lm/_02_homo_job.sh"
    text = body.read_text().replace(
        "##SBATCH --exclusive", "#SBATCH -t 30  # half an hour\n#SBATCH --exclusive"
    )
    body.write_text(text)
    settings = {"TIME_LIMIT": "10", "ACCOUNT": "mine", "SBATCH_OPTIONS": "--mem=0 --comment 'two words'"}
    shown = script("_03_submit.sh", "--dry-run", **settings).stdout
    wanted = ["--time=10", "--account=mine", "--mem=0 --comment 'two words'", "-t 30  # half an hour"]
    assert [line for line in header(shown) if line in wanted] == wanted
    more = ("--time", "1:00:00", "--qos", "high", "-C", "ib", "-pfast", "-A", "theirs", "--reservation=r")
    shown = script("_03_submit.sh", "--dry-run", "--", *more, **settings).stdout
    assert header(shown)[-1] == "--time 1:00:00 --qos high -C ib -pfast -A theirs --reservation=r"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--nodes=4", "error: --nodes=4 can't be given to sbatch"),
        ("--exclusive -o ../log2/%j.out", "LOG_DIR decides it"),
        ("--ntasks-per-node=2", "NPROC_PER_NODE"),
    ],
)
def test_an_sbatch_line_that_contradicts_the_settings_is_refused(
    script: Script, checkout: Path, line: str, words: str
) -> None:
    body = checkout / "megatron_lm/_02_homo_job.sh"
    body.write_text(body.read_text().replace("##SBATCH --exclusive", f"#SBATCH {line}"))
    done = script("_03_submit.sh", "--dry-run")
    assert done.returncode == 2 and words in done.stderr and len(done.stderr.splitlines()) == 1


def test_nodes_can_be_named_in_the_order_of_their_ranks(script: Script) -> None:
    shown = script("_03_submit.sh", "--dry-run", "NODELIST=n3,n1,n2", "MODEL=small", NNODES="3").stdout
    assert not shown
    sizes = {"NNODES": "4", "DP_SIZE": "2", "NODELIST": "n3,n1,n2,n9", "MODEL": "small"}
    (line,) = (o for o in header(script("_03_submit.sh", "--dry-run", **sizes).stdout) if "nodelist" in o)
    assert line == "--nodelist=n3,n1,n2,n9"
    shown = script(
        "_03_submit.sh", "--dry-run", **sizes, HOMOGENEOUS_CLUSTER="false", MASTER_NNODES="2"
    ).stdout
    assert [o for o in header(shown) if "nodelist" in o] == ["--nodelist=n3,n1", "--nodelist=n2,n9"]


@pytest.mark.parametrize(
    ("args", "env", "words"),
    [
        (["--bad"], {}, "--bad"),
        (["--het"], {}, "set HOMOGENEOUS_CLUSTER=false"),
        (["--het", "--local"], {}, "exclude each other"),
        (["--local", "--", "--time=1"], {}, "--local: options of sbatch have no effect"),
        (["MODLE=tiny"], {}, "'MODLE=tiny': give settings as NAME=VALUE"),
        (["--settings", "absent.conf"], {}, "absent.conf: can't be read"),
        (["NNODES=08"], {}, "NNODES=08: give a whole number"),
        ([], {"MEGATRON_NPROC_PER_NODE": "abc"}, "NPROC_PER_NODE=abc: give a whole number"),
        ([], {"PARTITION": "3-3"}, "PARTITION=3-3 adds up to 6 layers"),
        (["DATA_PATH=text"], {}, "text.bin; make it with megatron_lm/preprocess_data.py"),
        (["LOAD=ckpt"], {}, "there is no checkpoint"),
        (["SAVE_INTERVAL=5"], {}, "set SAVE to a folder"),
        (["CONTAINER_IMAGE_PATH=image.sqsh"], {}, "image.sqsh: there is no such file"),
        (["NODELIST=n1,n1", "NNODES=2", "NPROC_PER_NODE=1"], {}, "names 1 different nodes, NNODES is 2"),
        ([], {"PATH": "/usr/bin:/bin", "SLURM_CONF": "/nowhere"}, "sbatch was not found"),
    ],
)
def test_what_can_not_run_is_refused_before_anything_is_submitted(
    script: Script, tmp_path: Path, args: list[str], env: dict[str, str], words: str
) -> None:
    if "PATH" in env:
        # A machine without Slurm: the same tools, sbatch not among them.
        tools = tmp_path / "bin"
        tools.mkdir()
        for place in ("/usr/bin", "/bin"):
            for tool in Path(place).iterdir():
                if tool.name != "sbatch" and not (tools / tool.name).exists():
                    (tools / tool.name).symlink_to(tool)
        env = {"PATH": str(tools)}
    done = script("_03_submit.sh", *args, **env)
    assert done.returncode == 2
    # argparse prints its usage before the sentence.
    assert words in done.stderr.splitlines()[-1]
    assert done.stderr.startswith("usage: ") or len(done.stderr.splitlines()) == 1
    assert "Traceback" not in done.stderr and not done.stdout
    assert not (tmp_path / "log2").exists()


def test_a_setting_in_the_environment_without_its_prefix_is_refused(
    script: Script, tiny: dict[str, str]
) -> None:
    """And a variable that other programs set too is no setting."""
    tiny |= {"CONTAINER_NAME": "toolbox", "LOAD": "/nowhere", "WORLD_SIZE": "7"}
    done = script("_03_submit.sh", "--dry-run")
    assert done.returncode == 0 and "export MEGATRON_CONTAINER_NAME=megatron-lm" in done.stdout
    tiny["NNODES"] = "08"
    done = script("_03_submit.sh", "--dry-run")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: NNODES=08 in the environment: settings are read from MEGATRON_NNODES only; set that, or give "
        "NNODES to _03_submit.sh.\n"
    )


def test_arguments_override_a_file_which_overrides_the_environment(
    script: Script, checkout: Path, tmp_path: Path
) -> None:
    (tmp_path / "plan.conf").write_text("SEED=2\nLR=1e-3\nSAVE=here\n")
    shown = script(
        "_03_submit.sh", "--dry-run", "--settings", "plan.conf", "SEED=3", SEED="1", LR="1e-2"
    ).stdout
    assert "export MEGATRON_SEED=3\n" in shown and "export MEGATRON_LR=1e-3\n" in shown
    # Where the caller was.
    assert f"export MEGATRON_SAVE={tmp_path}/here\n" in shown


@pytest.mark.parametrize("body", ["_02_homo_job.sh", "_02_hetero_master_job.sh", "_02_hetero_slave_job.sh"])
def test_a_job_body_outside_of_slurm_says_how_to_submit_it(
    script: Script, checkout: Path, tmp_path: Path, body: str
) -> None:
    done = script(body)
    assert done.returncode == 1 and "submit it with megatron_lm/_03_submit.sh" in done.stderr
    # As sbatch copies a script to the node's spool folder.
    copied = shutil.copy(checkout / "megatron_lm" / body, tmp_path / "slurm_script")
    done = subprocess.run(["bash", copied], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr == (
        f"{body}: submit it with megatron_lm/_03_submit.sh, not with sbatch\n"
    )


@pytest.mark.parametrize(
    ("args", "said"), [(["0"], "two arguments"), (["x", "h"], "'x'"), (["1", "h"], "there are 1")]
)
def test_launching_a_node_needs_a_rank_and_an_address(script: Script, args: list[str], said: str) -> None:
    done = script("_01_run_inter.sh", *args)
    assert done.returncode == 2 and said in done.stderr and not done.stdout


def test_a_local_run_writes_the_logs_of_its_node_and_get_result_shows_them(
    script: Script, tmp_path: Path
) -> None:
    done = script("_03_submit.sh", "--local", PROFILE="true")
    assert done.returncode == 0, done.stderr
    job = done.stdout.strip()
    (out,) = (tmp_path / "log2" / job).glob("*.out")
    data = records.read(out)
    settings = records.settings(data)
    assert list(settings)[:4] == ["NODE_RANK", "MASTER_ADDR", "HOMOGENEOUS_CLUSTER", "MODEL"]
    wanted = {"PARTITION": "2-2", "NPROC_PER_NODE": "2", "HIDDEN_SIZE": "64", "NUM_LAYERS": "4"}
    assert settings.items() >= wanted.items()
    assert [it.number for it in records.iterations(data)] == [1, 2, 3, 4]
    assert sorted(line.rank for line in records.memory(data)) == [0, 1]
    assert out.with_suffix(".gpu").read_text().count("no GPU") == 1
    assert re.fullmatch(r"exit 0 \d{10}\n", out.with_suffix(".state").read_text())

    # Whatever the settings are today: what counts is what the run was submitted with.
    result = script("get_result.sh", job, PROFILE="false", MODEL="xl")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("no problems found\n")
    assert "iteration 4 : 0.0" in result.stdout and "\033" not in result.stdout
    kept = tmp_path / "log2" / job / "settings"
    assert {"PROFILE=true", "MODEL=tiny"} <= set(kept.read_text().splitlines())
    kept.write_text(kept.read_text().replace("GLOBAL_BATCH_SIZE=8", "GLOBAL_BATCH_SIZE=16"))
    changed = script("get_result.sh", job).stdout
    assert f"WRONG: GLOBAL_BATCH_SIZE is '8' on {out.stem}, the run was submitted with '16'" in changed
    again = script(
        "_03_submit.sh", "--dry-run", "--settings", str(kept), "NNODES=2", "WORLD_SIZE=4", "DP_SIZE=2"
    )
    assert again.returncode == 0 and "export MEGATRON_PROFILE=true\n" in again.stdout


def test_a_local_run_that_fails_says_so(script: Script) -> None:
    done = script("_03_submit.sh", "--local", STAND_IN_FAIL="message")
    job = done.stdout.strip()
    assert done.returncode != 0 and f"get_result.sh {job}" in done.stderr.splitlines()[-1]
    shown = script("get_result.sh", job).stdout.splitlines()
    assert shown[0].startswith(f"WRONG: job {job} is not running: FAILED (exit status")
    assert shown[1].startswith("WRONG: rank 0 on ") and shown[1].endswith("rank 0 was asked to fail")


def test_a_local_run_that_is_stopped_leaves_no_rank_behind(
    checkout: Path, tiny: dict[str, str], tmp_path: Path
) -> None:
    env = tiny | {"STAND_IN_SECONDS": "30", "MOSIM_GRACE_SECONDS": "5"}
    process = subprocess.Popen(
        [checkout / "megatron_lm/_03_submit.sh", "--local"], env=env, stdout=subprocess.PIPE, text=True
    )
    job = process.stdout.readline().strip()
    folder = tmp_path / "log2" / job
    marker = f"{checkout}/megatron_lm/_00_pretrain_gpt.py"
    wait_for(lambda: len(processes_with(marker)) >= 3)  # torchrun and two ranks
    shown = subprocess.run(
        [checkout / "megatron_lm/get_result.sh", job], env=tiny, capture_output=True, text=True
    )
    assert f"{job}: RUNNING" in shown.stdout and "no iteration logged yet" in shown.stdout
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    assert not processes_with(marker)
    (state,) = folder.glob("*.state")
    assert state.read_text().startswith("exit 143 ")
    shown = subprocess.run(
        [checkout / "megatron_lm/get_result.sh", job], env=tiny, capture_output=True, text=True
    )
    assert shown.stdout.startswith(f"WRONG: job {job} is not running: CANCELLED")


def test_the_scripts_are_clean_for_shellcheck() -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    if not shellcheck.exists():
        pytest.skip("shellcheck is not installed (the group dev has it)")
    scripts = [*(REPO_ROOT / "megatron_lm").glob("*.sh"), *(REPO_ROOT / "megatron_lm").glob("slurm/*.sh")]
    done = subprocess.run([shellcheck, "-x", "-P", REPO_ROOT, *scripts], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert len(scripts) >= 9


@pytest.mark.parametrize(
    ("setting", "tool", "wanted"),
    [
        ("NSYS", "nsys", "profile -t cuda,nvtx -o {root}/log-nsys/{job} --export=sqlite"),
        pytest.param(
            "NCU", "ncu", "--target-processes all --nvtx -o {root}/log-ncu/{job}", marks=pytest.mark.slow
        ),
    ],
)
def test_a_profiler_is_put_before_the_launch(
    script: Script, checkout: Path, tiny: dict[str, str], tmp_path: Path, setting: str, tool: str, wanted: str
) -> None:
    if not shutil.which(tool):
        done = script("_03_submit.sh", "--local", **{setting: "true"})
        assert done.returncode != 0
        assert f"{tool} is not installed" in script("get_result.sh", done.stdout.strip()).stdout
    put_tool(tmp_path / "bin", tool, """printf '%s\\n' "$*" >"$0.log"\n""")
    done = script(
        "_03_submit.sh", "--local", **{setting: "true", "PATH": f"{tmp_path / 'bin'}:{tiny['PATH']}"}
    )
    assert done.returncode == 0, done.stderr
    said = (tmp_path / f"bin/{tool}.log").read_text()
    assert said.startswith(wanted.format(root=checkout, job=done.stdout.strip()))
    assert "-m torch.distributed.run --nproc_per_node 2" in said


def test_options_that_are_settings_and_a_port_that_nobody_chose(script: Script) -> None:
    done = script("_03_submit.sh", "--stop-on-nan", "7", "--dry-run", MASTER_PORT="")
    assert done.returncode == 0, done.stderr
    assert "export MEGATRON_STOP_ON_NAN=7\n" in done.stdout and "MASTER_PORT" not in done.stdout
    chosen = script("_03_submit.sh", "MASTER_PORT=6787", "--dry-run")
    assert "export MEGATRON_MASTER_PORT=6787\n" in chosen.stdout
    refused = script("_03_submit.sh", "--stop-on-nan", "many", "--dry-run")
    assert refused.returncode == 2 and "STOP_ON_NAN=many: give a whole number" in refused.stderr
