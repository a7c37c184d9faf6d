"""Finds or makes the Python environment that a script runs in; prints the path of its interpreter.

    python scripts/environment.py {run,megatron,dev,mlcommons,convert}
    python scripts/environment.py list EXTRA-OR-GROUP…          the requirements in pyproject.toml
    python scripts/environment.py install INTERPRETER REQUIREMENT…

Standard library only, as it runs before anything is installed. An active environment, or the calling
Python (the Docker image), is used as it is where it meets the requirements of pyproject.toml; else ``.venv``
(for ``convert``: ``chakra-venv``) is made once, from locks/KIND.txt and the PyTorch of this machine, with uv
where there is one, and reused. A stamp, written last, tells a finished environment from a half-made one. All
messages go to stderr. ``MOSIM_TORCH=cpu`` or ``cuda`` overrules the search for an NVIDIA GPU.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from importlib import metadata
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]
TORCH = "torch==2.13.0"  # what the locks were tested with
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
UNREACHABLE = re.compile(
    r"NewConnectionError|ConnectTimeoutError|NameResolutionError|Network is unreachable|Failed to connect|"
    r"dns error|error sending request"
)
UNSATISFIABLE = re.compile(
    r"No matching distribution|ResolutionImpossible|No solution found|no version of", re.IGNORECASE
)
# Kind → lists of pyproject.toml. The last of "dev" is installed where an environment is made, but not
# demanded of one that is there: the Docker image has an older PyTorch than megatron-core needs, and its tests
# skip what needs megatron-core.
KINDS = {
    "run": ("dependencies", "train"),
    "megatron": ("dependencies", "train", "megatron"),
    "dev": ("dependencies", "train", "dev", "megatron"),
    "mlcommons": ("dependencies", "train", "mlcommons"),
    "convert": ("dependencies",),
}


def main(argv: list[str]) -> int:
    match argv:
        case [kind] if kind in KINDS:
            print(find_or_make(kind))
        case ["unmet", *requirements]:
            print("\n".join(filter(is_unmet, requirements)))
        case ["list", *names] if names:
            print("\n".join(requirements_of(names)))
        case ["install", python, *requirements] if requirements:
            return 0 if install(python, requirements, ROOT / "install.log") else 1
        case _:
            fail(f"usage: environment.py {{{','.join(KINDS)}}}", 2)
    return 0


def requirements_of(names: tuple[str, ...] | list[str]) -> list[str]:
    """The lines of these lists in pyproject.toml, which Python 3.10 has no parser for."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found: dict[str, None] = {}
    for name in names:
        lists = re.findall(rf"^{re.escape(name)} = \[\n?(.*?)\]$", text, re.MULTILINE | re.DOTALL)
        if not lists:
            fail(f"pyproject.toml has no list {name}")
        found |= dict.fromkeys(re.findall(r'"([^"]+)"', lists[0]))
    return list(found)


def find_or_make(name: str) -> Path:
    """The interpreter of an environment that meets the requirements of ``name``; made if there is none."""
    folder = ROOT / ("chakra-venv" if name == "convert" else ".venv")
    active = [Path(os.environ[key]) for key in ("VIRTUAL_ENV", "CONDA_PREFIX") if os.environ.get(key)]
    for environment in active:
        python = environment / "bin" / "python"
        if environment.resolve() == folder.resolve() or not python.exists():
            continue
        missing = unmet_in(python, name)
        if not missing:
            return python
        say(f"the active environment {environment} lacks {', '.join(missing)}: using {folder.name}/")
    if is_ready(folder, name):
        return folder / "bin" / "python"
    if not active and not unmet_in(Path(sys.executable), name):
        return Path(sys.executable)
    return make(folder, name)


def unmet_in(python: Path, name: str) -> list[str]:
    """What is demanded for ``name`` and the environment of ``python`` does not meet."""
    demanded = KINDS[name][:3] if name == "dev" else KINDS[name]
    command = [str(python), __file__, "unmet", *requirements_of(demanded)]
    answer = subprocess.run(command, capture_output=True, text=True)
    return answer.stdout.split() if answer.returncode == 0 else ["a Python that runs"]


def is_unmet(requirement: str) -> bool:
    """Whether this interpreter lacks ``name>=1.2,<3`` (``packaging`` may be missing)."""

    def release(version: str) -> list[int]:
        # 2.4.0+cpu as [2, 4]: trailing zeros say nothing.
        return [int(part) for part in re.sub(r"(\.0+)*$", "", re.match(r"[\d.]*", version)[0]).split(".")]

    try:
        installed = release(metadata.version(re.match(r"[\w.-]+", requirement)[0]))
    except metadata.PackageNotFoundError:
        return True
    meets = {"==": installed.__eq__, ">=": installed.__ge__, "<": installed.__lt__}
    return not all(meets[sign](release(at)) for sign, at in re.findall(r"(==|>=|<)\s*([\d.]+)", requirement))


def is_ready(folder: Path, name: str) -> bool:
    stamp = folder / f"mosim-ready-{name}"
    if not stamp.exists() or (folder / "mosim-installing").exists():
        return False
    if stamp.read_text().split()[:1] != [fingerprint(name)] or not runs(folder / "bin" / "python"):
        return False
    return not needs_gpu_build(folder)


def fingerprint(name: str) -> str:
    parts = [TORCH, *requirements_of(KINDS[name]), (ROOT / "locks" / f"{name}.txt").read_text()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def needs_gpu_build(folder: Path) -> bool:
    """Whether ``folder`` was made where there was no GPU (a login node, say) and there is one here."""
    made_for = [stamp.read_text().split()[1:] for stamp in folder.glob("mosim-ready-*")]
    return ["cpu"] in made_for and folder.name == ".venv" and has_nvidia_gpu()


def has_nvidia_gpu() -> bool:
    wanted = os.environ.get("MOSIM_TORCH")
    if wanted in ("cpu", "cuda"):
        return wanted == "cuda"
    if not shutil.which("nvidia-smi"):
        return False
    answer = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return answer.returncode == 0 and "GPU" in answer.stdout


def runs(python: Path) -> bool:
    return python.exists() and subprocess.run([python, "-c", ""], capture_output=True).returncode == 0


def make(folder: Path, name: str) -> Path:
    """Make or complete the environment of ``name``, one process at a time."""
    python, half_made = folder / "bin" / "python", folder / "mosim-installing"
    with open(ROOT / f"{folder.name}.lock", "w") as lock:
        # What is started below holds the lock too: if this process is killed, no other starts beside it.
        os.set_inheritable(lock.fileno(), True)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another set-up that is at work in {folder.name}/")
            fcntl.flock(lock, fcntl.LOCK_EX)
        if is_ready(folder, name):
            return python
        if folder.exists() and (half_made.exists() or not runs(python) or needs_gpu_build(folder)):
            say(f"{folder.name}/ is incomplete or of another kind: making it anew")
            shutil.rmtree(folder)
        stamps = list(folder.glob("mosim-ready-*"))
        if folder.exists() and not stamps and not unmet_in(python, name):
            return python  # made by hand, and good
        if not folder.exists():
            create(folder)
        half_made.touch()
        for stamp in stamps:
            stamp.unlink()
        log, gpu = folder / "install.log", has_nvidia_gpu()
        say(f"installing {' and '.join(KINDS[name])} (the first time takes a while); progress: tail -f {log}")
        fill(name, str(python), gpu, log)
        # What every conversion imports, as bytecode: where PYTHONDONTWRITEBYTECODE is set, as in many
        # containers, each start would compile it again, which takes longer than converting a small trace.
        packages = [
            *folder.glob("lib/python*/site-packages/numpy"),
            *folder.glob("lib/*/site-packages/msgspec"),
        ]
        words = ["-m", "compileall", "-qq", "-j", "0", "-x", "/tests/|/f2py/", *packages, ROOT / "chakra_et"]
        subprocess.run([python, *words], stdout=subprocess.DEVNULL)
        half_made.unlink()
        for other, lists in KINDS.items():
            if set(lists) <= set(KINDS[name]) and (other == "convert") == (name == "convert"):
                stamp = folder / f"mosim-ready-{other}"
                stamp.write_text(f"{fingerprint(other)} {'gpu' if gpu else 'cpu'}\n")
    return python


def create(folder: Path) -> None:
    say(f"making {folder.name}/ with Python {sys.version.split()[0]} ({sys.executable})")
    commands = [[sys.executable, "-m", "venv", str(folder)]]
    if shutil.which("uv"):
        commands.insert(0, ["uv", "venv", "--seed", "--quiet", "--python", sys.executable, str(folder)])
    for command in commands:
        if subprocess.run(command, stdout=sys.stderr, close_fds=False).returncode == 0:
            return
        shutil.rmtree(folder, ignore_errors=True)
    fail("no environment can be made: install python3-venv (Debian, Ubuntu: apt install python3-venv) or uv")


def fill(name: str, python: str, gpu: bool, log: Path) -> None:
    """Install the lock of a kind, whole and so without dependencies, and then PyTorch with its own."""
    wanted, options = requirements_of(KINDS[name]), []
    pinned = [["--no-deps", "-r", str(ROOT / "locks" / f"{name}.txt")]]
    if any(each.startswith("torch>") for each in wanted):
        if not gpu and sys.platform == "linux" and has_cpu_index():
            options = ["--extra-index-url", CPU_INDEX]
        pinned.append([TORCH, *options])
    if all(install(python, each, log) for each in pinned):
        return
    output = log.read_text(errors="replace")
    if UNREACHABLE.search(output):
        fail(f"the package registry cannot be reached; the whole log is {log}")
    if UNSATISFIABLE.search(output):
        say(f"locks/{name}.txt cannot be met by this Python or registry: taking the newest in range")
        if install(python, [*wanted, *options], log):
            return
    say("\n".join(log.read_text(errors="replace").splitlines()[-5:]))
    fail(f"the packages could not be installed; the whole log is {log}")


def has_cpu_index() -> bool:
    """Whether the CPU build of PyTorch can be had; the registry's own build for Linux brings CUDA along."""
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{CPU_INDEX}/torch/", method="HEAD"), timeout=5):
            return True
    except OSError:
        say(f"{CPU_INDEX} cannot be reached: PyTorch comes from where pip looks, perhaps with CUDA (some GB)")
        return False


def install(python: str, arguments: list[str], log: Path) -> bool:
    """Install with uv where there is one, else with pip; what they print goes to ``log``."""
    commands = [[python, "-m", "pip", "install", "--no-input", "--no-compile", *arguments]]
    if shutil.which("uv"):
        # uv doesn't know pip's mirrors and fails where pip succeeds, so pip is the second try.
        uv = ["uv", "pip", "install", "--python", python, "--index-strategy", "unsafe-best-match"]
        commands.insert(0, [*uv, *arguments])
    for command in commands:
        with open(log, "a") as file:
            print(f"$ {shlex.join(command)}", file=file, flush=True)
            if subprocess.run(command, stdout=file, stderr=file, close_fds=False).returncode == 0:
                return True
    return False


def say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


def fail(sentence: str, status: int = 1) -> NoReturn:
    say(f"set-up: {sentence}")
    sys.exit(status)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        fail(str(error))
