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
from typing import NamedTuple, NoReturn

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


class Kind(NamedTuple):
    folder: str
    demanded: tuple[str, ...]
    # Installed where an environment is made, but not demanded of one that is there: the Docker image has an
    # older PyTorch than megatron-core needs, and its tests skip what needs megatron-core.
    more: tuple[str, ...] = ()

    @property
    def installed(self) -> tuple[str, ...]:
        return (*self.demanded, *self.more)


KINDS = {
    "run": Kind(".venv", ("dependencies", "train")),
    "megatron": Kind(".venv", ("dependencies", "train", "megatron")),
    "dev": Kind(".venv", ("dependencies", "train", "dev"), more=("megatron",)),
    "mlcommons": Kind(".venv", ("dependencies", "train", "mlcommons")),
    "convert": Kind("chakra-venv", ("dependencies",)),
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
            return 0 if install(python, requirements, ROOT / "install.log", None) else 1
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


# --- which environment ------------------------------------------------------------------------------


def find_or_make(name: str) -> Path:
    """The interpreter of an environment that meets the requirements of ``name``; made if there is none."""
    kind = KINDS[name]
    folder = ROOT / kind.folder
    active = [Path(os.environ[key]) for key in ("VIRTUAL_ENV", "CONDA_PREFIX") if os.environ.get(key)]
    for environment in active:
        python = environment / "bin" / "python"
        if environment.resolve() == folder.resolve() or not python.exists():
            continue
        missing = unmet_in(python, kind)
        if not missing:
            return python
        say(f"the active environment {environment} lacks {', '.join(missing)}: using {kind.folder}/")
    if is_ready(folder, name):
        return folder / "bin" / "python"
    if not active and not unmet_in(Path(sys.executable), kind):
        return Path(sys.executable)
    return make(name)


def unmet_in(python: Path, kind: Kind) -> list[str]:
    """The requirements of ``kind`` that the environment of ``python`` does not meet."""
    command = [str(python), __file__, "unmet", *requirements_of(kind.demanded)]
    answer = subprocess.run(command, capture_output=True, text=True)
    return answer.stdout.split() if answer.returncode == 0 else ["a Python that runs"]


def is_unmet(requirement: str) -> bool:
    """Whether this interpreter lacks ``name>=1.2,<3`` (``packaging`` may be missing)."""
    name = re.match(r"[\w.-]+", requirement).group()
    try:
        installed = release(metadata.version(name))
    except metadata.PackageNotFoundError:
        return True
    meets = {"==": installed.__eq__, ">=": installed.__ge__, "<": installed.__lt__}
    return not all(meets[sign](release(at)) for sign, at in re.findall(r"(==|>=|<)\s*([\d.]+)", requirement))


def release(version: str) -> tuple[int, ...]:
    """``2.4.0+cpu`` as (2, 4): trailing zeros say nothing."""
    numbers = [int(part) for part in re.match(r"[\d.]*", version).group().split(".") if part]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


# --- making it --------------------------------------------------------------------------------------


def make(name: str) -> Path:
    """Make or complete the environment of ``name``, one process at a time."""
    kind = KINDS[name]
    folder = ROOT / kind.folder
    python = folder / "bin" / "python"
    with open(ROOT / f"{kind.folder}.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another set-up that is at work in {kind.folder}/")
            fcntl.flock(lock, fcntl.LOCK_EX)
        if is_ready(folder, name):
            return python
        gpu = has_nvidia_gpu()
        half_made = folder / "mosim-installing"
        if folder.exists() and (half_made.exists() or not runs(python) or needs_gpu_build(folder, gpu)):
            say(f"{kind.folder}/ is incomplete or of another kind: making it anew")
            shutil.rmtree(folder)
        if runs(python) and not unmet_in(python, kind) and not list(folder.glob("mosim-ready-*")):
            return python  # made by hand, and good
        if not folder.exists():
            create(folder, lock.fileno())
        half_made.touch()
        for stamp in folder.glob("mosim-ready-*"):
            stamp.unlink()
        say(f"installing {' and '.join(kind.installed)} into {kind.folder}/ (the first time takes a while)")
        fill(name, python, gpu, folder / "install.log", lock.fileno())
        compile_ahead(python, folder)
        half_made.unlink()
        for other, candidate in KINDS.items():
            if candidate.folder == kind.folder and set(candidate.installed) <= set(kind.installed):
                stamp_of(folder, other).write_text(f"{fingerprint(other)} {'gpu' if gpu else 'cpu'}\n")
    return python


def fill(name: str, python: Path, gpu: bool, log: Path, lock: int) -> None:
    """Install the lock of a kind, whole and so without dependencies, and then PyTorch with its own."""
    wanted = requirements_of(KINDS[name].installed)
    torch = any(each.startswith("torch>") for each in wanted)
    options = cpu_torch_options() if torch and not gpu else []
    pinned = [["--no-deps", "-r", str(ROOT / "locks" / f"{name}.txt")]]
    pinned += [[TORCH, *options]] if torch else []
    if all(install(str(python), each, log, lock) for each in pinned):
        return
    output = log.read_text(errors="replace")
    if UNREACHABLE.search(output):
        fail(f"the package registry cannot be reached; the whole log is {log}")
    if UNSATISFIABLE.search(output):
        say(f"locks/{name}.txt cannot be met by this Python or registry: taking the newest in range")
        if install(str(python), [*wanted, *options], log, lock):
            return
    say(*log.read_text(errors="replace").splitlines()[-5:], sep="\n")
    fail(f"the packages could not be installed; the whole log is {log}")


def compile_ahead(python: Path, folder: Path) -> None:
    """Compile what every conversion imports to bytecode.

    Where PYTHONDONTWRITEBYTECODE is set, as in many containers, each start would compile it again, which
    takes longer than converting a small trace.
    """
    found = [
        str(path)
        for name in ("numpy", "msgspec")
        for path in folder.glob(f"lib/python*/site-packages/{name}")
    ]
    words = ["-m", "compileall", "-q", "-j", "0", "-x", "/tests/|/f2py/", *found, str(ROOT / "chakra_et")]
    subprocess.run([python, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


def install(python: str, arguments: list[str], log: Path, lock: int | None) -> bool:
    """Install with uv where there is one, else with pip; what they print goes to ``log``."""
    pip = [python, "-m", "pip", "install", "--no-input", "--no-compile", *arguments]
    commands = [pip]
    if shutil.which("uv"):
        uv = ["uv", "pip", "install", "--python", python, "--index-strategy", "unsafe-best-match"]
        # uv doesn't know pip's mirrors and fails where pip succeeds, so pip is the second try.
        commands.insert(0, [*uv, *arguments])
    return any(run_logged(command, log, lock) for command in commands)


def run_logged(command: list[str], log: Path, lock: int | None) -> bool:
    """Run a command into a log, showing its newest line where a person looks on."""
    # The child holds the lock too: if this process is killed, no other set-up starts beside its child.
    inherited = () if lock is None else (lock,)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    process = subprocess.Popen(command, pass_fds=inherited, **streams)
    width = shutil.get_terminal_size().columns - 1
    with open(log, "a") as file:
        file.write(f"$ {shlex.join(map(str, command))}\n")
        for line in process.stdout:
            file.write(line)
            file.flush()
            if sys.stderr.isatty():
                print(f"\r\033[K{line.strip()[:width]}", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    return process.wait() == 0


def create(folder: Path, lock: int) -> None:
    say(f"making {folder.name}/ with Python {sys.version.split()[0]} ({sys.executable})")
    commands = [[sys.executable, "-m", "venv", str(folder)]]
    if shutil.which("uv"):
        commands.insert(0, ["uv", "venv", "--seed", "--quiet", "--python", sys.executable, str(folder)])
    for command in commands:
        if subprocess.run(command, stdout=sys.stderr, pass_fds=(lock,)).returncode == 0:
            return
        shutil.rmtree(folder, ignore_errors=True)
    fail("no environment can be made: install python3-venv (Debian, Ubuntu: apt install python3-venv) or uv")


# --- stamps -----------------------------------------------------------------------------------------


def stamp_of(folder: Path, name: str) -> Path:
    return folder / f"mosim-ready-{name}"


def fingerprint(name: str) -> str:
    parts = [TORCH, *requirements_of(KINDS[name].installed), (ROOT / "locks" / f"{name}.txt").read_text()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def is_ready(folder: Path, name: str) -> bool:
    stamp = stamp_of(folder, name)
    if not stamp.exists() or (folder / "mosim-installing").exists():
        return False
    if stamp.read_text().split()[:1] != [fingerprint(name)] or not runs(folder / "bin" / "python"):
        return False
    return not needs_gpu_build(folder, None)


def needs_gpu_build(folder: Path, gpu: bool | None) -> bool:
    """Whether ``folder`` was made where there was no GPU (a login node, say) and there is one here."""
    stamps = [stamp.read_text().split()[1:] for stamp in folder.glob("mosim-ready-*")]
    made_for_cpu = ["cpu"] in stamps and folder.name == ".venv"
    return made_for_cpu and (has_nvidia_gpu() if gpu is None else gpu)


def runs(python: Path) -> bool:
    return python.exists() and subprocess.run([python, "-c", ""], capture_output=True).returncode == 0


# --- what this machine and its registry offer -------------------------------------------------------


def has_nvidia_gpu() -> bool:
    wanted = os.environ.get("MOSIM_TORCH")
    if wanted in ("cpu", "cuda"):
        return wanted == "cuda"
    if not shutil.which("nvidia-smi"):
        return False
    answer = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return answer.returncode == 0 and "GPU" in answer.stdout


def cpu_torch_options() -> list[str]:
    """Where the CPU build of PyTorch comes from; on Linux the registry's own build brings CUDA along."""
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{CPU_INDEX}/torch/", method="HEAD"), timeout=5):
            return ["--extra-index-url", CPU_INDEX] if sys.platform == "linux" else []
    except OSError:
        say(f"{CPU_INDEX} cannot be reached: PyTorch comes from where pip looks, perhaps with CUDA (some GB)")
        return []


def say(*words: str, sep: str = " ") -> None:
    print(*words, sep=sep, file=sys.stderr, flush=True)


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
