"""Submission: what would be given to sbatch, and runs on this machine."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_lm.logs import records
from tests.megatron_lm.conftest import REPO_ROOT, Script


def test_a_homogeneous_run_is_one_job_with_its_headers_from_the_settings(
    script: Script, tmp_path: Path
) -> None:
    done = script("_03_submit.sh", "--dry-run", MODEL="small", SLURM_QUEUE="gpu", CPUS_PER_TASK="12")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "# sbatch --parsable",
        "#!/usr/bin/env bash",
        "#SBATCH --job-name=gpt2_small",
        "#SBATCH --nodes=8",
        "#SBATCH --partition=gpu",
        "#SBATCH --gres=gpu:4",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --cpus-per-task=12",
        f"#SBATCH --output={tmp_path}/log2/slurm-%j.out",
        f"exec {tmp_path}/repo/megatron_lm/_02_homo_job.sh",
        "",
    ]
    assert not (tmp_path / "log2").exists()


def test_without_gres_and_queue_there_are_no_such_headers(script: Script) -> None:
    headers = script("_03_submit.sh", "--dry-run", GRES="").stdout
    assert "--gres" not in headers and "--partition" not in headers


HETERO = {"HOMOGENEOUS_CLUSTER": "false", "MODEL": "xl", "MASTER_QUEUE": "a100", "SLAVE_QUEUE": "a10"}


def test_a_heterogeneous_run_is_two_jobs_and_the_second_is_told_of_the_first(script: Script) -> None:
    shown = script("_03_submit.sh", "--dry_run", **HETERO).stdout
    master, slave = shown.split("\n\n")[:2]
    assert "--nodes=1\n#SBATCH --partition=a100" in master and "_02_hetero_master_job.sh" in master
    assert "--nodes=7\n#SBATCH --partition=a10" in slave and "_02_hetero_slave_job.sh" in slave
    assert "--dependency=after:<master job id>" in slave and "MASTER_JOB_ID=<master job id>" in slave


def test_het_is_one_script_of_two_parts(script: Script) -> None:
    shown = script("_03_submit.sh", "--het", "--dry-run", **HETERO).stdout
    first, second = shown.split("#SBATCH hetjob\n")
    assert "--nodes=1" in first and "--nodes=7" in second
    assert shown.count("#!/usr/bin/env bash") == shown.count("exec ") == 1


@pytest.mark.parametrize(
    ("args", "env", "said"),
    [
        (["--bad"], {}, "unknown option '--bad'"),
        (["--het"], {}, "set HOMOGENEOUS_CLUSTER=false"),
        (["--het", "--local"], {}, "exclude each other"),
        ([], {"PARTITION": "3-3"}, "PARTITION=3-3 adds up to 6 layers"),
        ([], {"PATH": "/usr/bin:/bin", "SLURM_CONF": "/nowhere"}, "sbatch"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(
    script: Script, tmp_path: Path, args: list[str], env: dict[str, str], said: str
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
    assert done.returncode != 0
    assert said in done.stderr and len(done.stderr.splitlines()) == 1
    assert "Traceback" not in done.stderr and not done.stdout
    assert not (tmp_path / "log2").exists()


@pytest.mark.parametrize("body", ["_02_homo_job.sh", "_02_hetero_master_job.sh", "_02_hetero_slave_job.sh"])
def test_a_job_body_outside_of_slurm_says_how_to_submit_it(script: Script, body: str) -> None:
    done = script(body)
    assert done.returncode == 1 and "submit it by megatron_lm/_03_submit.sh" in done.stderr


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
    assert settings["PARTITION"] == "2-2" and settings["NPROC_PER_NODE"] == "2"
    assert [it.number for it in records.iterations(data)] == [1, 2, 3, 4]
    assert sorted(line.rank for line in records.memory(data)) == [0, 1]
    assert out.with_suffix(".gpu").read_text().count("no GPU") == 1
    assert out.with_suffix(".state").read_text() == "exit 0\n"

    result = script("get_result.sh", job, PROFILE="true")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("no problems found\n")
    assert "iteration 4 : 0.0" in result.stdout and "\033" not in result.stdout
    changed = script("get_result.sh", job, GLOBAL_BATCH_SIZE="16").stdout
    assert "WRONG: GLOBAL_BATCH_SIZE was '8' in the run and is '16' in _00_conf.sh" in changed
    assert "WRONG: PROFILE was 'true' in the run and is 'false' in _00_conf.sh" in changed


def test_a_local_run_that_fails_says_so(script: Script) -> None:
    done = script("_03_submit.sh", "--local", STAND_IN_FAIL="1")
    job = done.stdout.strip()
    assert done.returncode != 0 and f"get_result.sh {job}" in done.stderr.splitlines()[-1]
    shown = script("get_result.sh", job).stdout.splitlines()
    assert shown[0].startswith(f"WRONG: job {job} is not running: FAILED (exit status")
    assert shown[1].startswith("WRONG: error on ") and shown[1].endswith("rank 0 was told to fail")


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
    assert state.read_text() == "exit 143\n"
    shown = subprocess.run(
        [checkout / "megatron_lm/get_result.sh", job], env=tiny, capture_output=True, text=True
    )
    assert shown.stdout.startswith(f"WRONG: job {job} is not running: CANCELLED")


def test_the_scripts_are_clean_for_shellcheck() -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    if not shellcheck.exists():
        pytest.skip("shellcheck is not installed (requirements-dev.txt has it)")
    scripts = [*(REPO_ROOT / "megatron_lm").glob("*.sh"), *(REPO_ROOT / "megatron_lm").glob("slurm/*.sh")]
    done = subprocess.run([shellcheck, "-x", "-P", REPO_ROOT, *scripts], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert len(scripts) >= 9


def processes_with(marker: str) -> list[int]:
    """Ids of the processes that have ``marker`` in their command line."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if marker.encode() in entry.read_bytes() and int(entry.parent.name) != os.getpid():
                found.append(int(entry.parent.name))
        except OSError:
            continue
    return found


def wait_for(condition, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.2)


def put_tool(folder: Path, name: str, body: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/usr/bin/env bash\n{body}")
    (folder / name).chmod(0o755)


ENROOT = """
printf '%s\\n' "$*" >>"$0.log"
case $1 in
    list) [ ! -e "$0.made" ] || echo megatron-lm ;;
    create) touch "$0.made" ;;
    remove) rm -f "$0.made" ;;
    start)
        shift
        while [ "$1" != megatron-lm ]; do
            case $1 in --mount | --env) shift 2 ;; *) shift ;; esac
        done
        shift
        exec "$@" ;;
esac
"""


def test_with_enroot_the_ranks_run_in_the_container(
    script: Script, tiny: dict[str, str], tmp_path: Path
) -> None:
    """A stand-in for enroot notes how it is called, and runs what it is given without a container."""
    put_tool(tmp_path / "bin", "enroot", ENROOT)
    image = tmp_path / "megatron.sqsh"
    image.touch()
    env = {
        "PATH": f"{tmp_path / 'bin'}:{tiny['PATH']}",
        "CONTAINER_IMAGE_PATH": str(image),
        "CONTAINER_PATH": str(tmp_path / "unpacked"),
        "CONTAINER_NAME": "megatron-lm",
        "CONTAINER_PYTHON": sys.executable,
        "DATA_PATH": "/data/squad/text",
    }
    calls = tmp_path / "bin/enroot.log"
    for reload, expected in (("false", 3), ("false", 2), ("true", 4)):
        done = script("_03_submit.sh", "--local", RELOAD_CONTAINER=reload, **env)
        assert done.returncode == 0, done.stderr
        said = calls.read_text().splitlines()
        calls.unlink()
        kinds = [line.split()[0] for line in said]
        assert kinds == [
            *(["remove"] if reload == "true" else []),
            "list",
            *(["create"] if expected > 2 else []),
            "start",
        ]
    assert f"create --name megatron-lm {image}" in said
    start = said[-1]
    for mounted in (f"{tmp_path}/repo", f"{tmp_path}/log2", "/data/squad"):
        assert f"--mount {mounted}:{mounted} " in start
    assert (
        "--env MODEL=tiny " in start
        and "--env PARTITION=2-2 " in start
        and "-m torch.distributed.run" in start
    )


@pytest.mark.parametrize(
    ("setting", "tool", "wanted"),
    [
        ("NSYS", "nsys", "profile -t cuda,nvtx -o {root}/log-nsys/{job} --export=sqlite"),
        ("NCU", "ncu", "--target-processes all --nvtx -o {root}/log-ncu/{job}"),
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
