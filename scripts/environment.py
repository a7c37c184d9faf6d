"""Finds or makes the Python environment that a script runs in; prints the path of its interpreter.

    python scripts/environment.py {run,megatron,dev,mlcommons,convert}
    python scripts/environment.py check KIND                    whether the calling Python meets them
    python scripts/environment.py list EXTRA-OR-GROUP…          the requirements in pyproject.toml

The calling Python (an active environment, the Docker image) is used as it is where it meets the requirements
of pyproject.toml; else ``.venv`` (for ``convert``: ``chakra-venv``) is made once, from locks/KIND.txt and the
PyTorch of this machine. MOSIM_TORCH=cpu or cuda overrules the search for a GPU.
"""

from __future__ import annotations

import fcntl
import operator
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TORCH = "torch==2.13.0"  # what the locks were tested with
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# Kind → lists of pyproject.toml. The last of "dev" is not demanded of an environment that isn't ours: the
# image's PyTorch is older than megatron-core needs, and its tests skip what needs megatron-core.
KINDS = {
    "run": ("dependencies", "train"),
    "megatron": ("dependencies", "train", "megatron"),
    "dev": ("dependencies", "train", "dev", "megatron"),
    "mlcommons": ("dependencies", "train", "mlcommons"),
    "convert": ("dependencies",),
}


def requirements_of(names: tuple[str, ...] | list[str]) -> list[str]:
    """The lines of these lists in pyproject.toml, which Python 3.10 has no parser for."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    lists = [re.findall(rf"^{re.escape(name)} = \[\n?(.*?)\]$", text, re.M | re.S)[0] for name in names]
    return list(dict.fromkeys(each for found in lists for each in re.findall(r'"([^"]+)"', found)))


def unmet(lists: tuple[str, ...], path: list[str]) -> list[str]:
    """Which ``name>=1.2,<3`` of these lists the packages on a path don't meet."""
    signs, missing = {"==": operator.eq, ">=": operator.ge, "<": operator.lt}, []
    for requirement in requirements_of(lists):
        name = re.match(r"[\w.-]+", requirement)[0]
        bounds = re.findall(r"(==|>=|<) *([\d.]+)", requirement)
        found = [_numbers(each.version) for each in metadata.distributions(name=name, path=path)]
        if not found or not all(signs[sign](found[0], _numbers(bound)) for sign, bound in bounds):
            missing.append(requirement)
    return missing


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version.partition("+")[0])]


def find_or_make(kind: str) -> Path:
    """The interpreter of an environment that meets the requirements of ``kind``."""
    folder = ROOT / ("chakra-venv" if kind == "convert" else ".venv")
    if Path(sys.prefix) != folder:
        missing = unmet(KINDS[kind][:3], sys.path)
        if not missing:
            return Path(sys.executable)
        if sys.prefix != sys.base_prefix:
            say(f"the active environment {sys.prefix} lacks {', '.join(missing)}: using {folder.name}/")
    if not is_ready(folder, kind):
        with open(ROOT / f"{folder.name}.lock", "w") as lock:
            # What is started below holds the lock too: if this process is killed, no other starts beside it.
            os.set_inheritable(lock.fileno(), True)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not is_ready(folder, kind):
                make(folder, kind)
    return folder / "bin/python"


def is_ready(folder: Path, kind: str) -> bool:
    return is_whole(folder) and not unmet(KINDS[kind], list(map(str, folder.glob("lib/*/site-packages"))))


def is_whole(folder: Path) -> bool:
    """Whether it has a Python, no set-up was interrupted, and a GPU that is here was there then."""
    lacks_gpu = (folder / "mosim-cpu").exists() and has_gpu()
    return (folder / "bin/python").exists() and not (lacks_gpu or (folder / "mosim-installing").exists())


def has_gpu() -> bool:
    wanted = os.environ.get("MOSIM_TORCH")
    if wanted in ("cpu", "cuda") or not shutil.which("nvidia-smi"):
        return wanted == "cuda"
    return b"GPU" in subprocess.run(["nvidia-smi", "-L"], capture_output=True).stdout


def make(folder: Path, kind: str) -> None:
    """Make or complete the environment of a kind: its lock, whole and so without dependencies; PyTorch."""
    if folder.exists() and not is_whole(folder):
        say(f"{folder.name}/ is incomplete or of another kind: making it anew")
        shutil.rmtree(folder)
    if not folder.exists():
        say(f"making {folder.name}/ with Python {sys.version.split()[0]} ({sys.executable})")
        if subprocess.run([sys.executable, "-m", "venv", folder], stdout=sys.stderr).returncode:
            sys.exit("set-up: no environment can be made: install python3-venv (apt install python3-venv)")
    (folder / "mosim-installing").touch()
    index, pinned = [], [["--no-deps", "-r", ROOT / "locks" / f"{kind}.txt"]]
    if kind != "convert":
        if not has_gpu():
            (folder / "mosim-cpu").touch()
            index = cpu_index()
        pinned.append([TORCH, *index])
    log = folder / "install.log"
    say(f"installing {' and '.join(KINDS[kind])} (the first time takes a while); progress: tail -f {log}")
    if not all(install(folder, each) for each in pinned):
        say(f"locks/{kind}.txt cannot be installed here: taking the newest in range")
        if not install(folder, [*requirements_of(KINDS[kind]), *index]):
            say("\n".join(log.read_text(errors="replace").splitlines()[-5:]))
            sys.exit(f"set-up: the packages could not be installed; the whole log is {log}")
    # Where PYTHONDONTWRITEBYTECODE is set, each conversion would compile them again.
    used = [ROOT / "chakra_et", *folder.glob("lib/*/*/numpy"), *folder.glob("lib/*/*/msgspec")]
    subprocess.run([folder / "bin/python", "-m", "compileall", "-qq", "-j0", "-x/tests/|/f2py/", *used])
    (folder / "mosim-installing").unlink()


def cpu_index() -> list[str]:
    """The option for PyTorch's CPU build; the registry's own build for Linux brings CUDA along."""
    try:
        urllib.request.urlopen(f"{CPU_INDEX}/torch/", timeout=5).close()
        return ["--extra-index-url", CPU_INDEX]
    except OSError:
        say(f"{CPU_INDEX} cannot be reached: PyTorch may come with CUDA (some GB)")
        return []


def install(folder: Path, words: list[object]) -> bool:
    command = [folder / "bin/python", "-m", "pip", "install", "--no-input", "--no-compile", *words]
    with open(folder / "install.log", "a") as log:
        return subprocess.run(command, stdout=log, stderr=log, close_fds=False).returncode == 0


def say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        kind, *names = sys.argv[1:] or ["?"]
        if kind == "check":
            if missing := unmet(KINDS[names[0]], sys.path):
                advice = f"make the environment with 'python3 scripts/environment.py {names[0]}'"
                sys.exit(f"{sys.executable}: lacks {', '.join(missing)}; {advice} or use its requirements")
        elif kind in ("-h", "--help"):
            print(__doc__)
        elif kind != "list" and kind not in KINDS:
            sys.exit(f"usage: environment.py {{{','.join(KINDS)}}}")
        else:
            print("\n".join(requirements_of(names)) if kind == "list" else find_or_make(kind))
    except (OSError, KeyboardInterrupt) as error:
        sys.exit(f"set-up: {error or 'interrupted'}")
