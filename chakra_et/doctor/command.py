"""``chakra-et doctor``: check captures, predictions, kernel times and verdicts on this machine.

    chakra-et doctor -o doctor
    chakra-et doctor -o doctor --part what-ifs --again

Results: doctor.json and doctor.md in the folder, written as they are found. A part that was done isn't run
again, unless with --again; one that was stopped is.
Exit status: 0; 1 where a check failed; 2 for arguments that can't be used.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from chakra_et import cli
from chakra_et.doctor.results import CUT_OFF, Line, Results, guarded

PARTS = {
    "capture": ("captures", "complete"),
    "what-ifs": ("captures", "predicted"),
    "kernels": ("kernels", "check"),
    "verdicts": ("captures", "verdicts"),
}
"""Part → its module, which needs PyTorch, and the function."""
EXTRA: dict[str, Callable[[Path, bool], Iterator[Line]]] = {}
"""Parts that a checkout adds, see scripts/gpu_check.py."""


@dataclass
class DoctorConfig:
    part: tuple[str, ...] = cli.option(f"parts to run: {', '.join(PARTS)} (default: all)", ())
    output: str = cli.option("folder of the results", "doctor", short="-o")
    again: bool = cli.option("also run parts that are done", False)
    cpu: bool = cli.option("run on the CPU although there is a GPU", False)

    def __post_init__(self) -> None:
        for each in self.part:
            if each not in (known := [*PARTS, *EXTRA]):
                raise ValueError(f"--part {each}: use {', '.join(known)}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts that are asked for and not done; returns the exit status."""
    config = cli.parse(DoctorConfig, argv, description="Check capture and prediction on this machine.")
    if config.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # also of the programs that are started
    machine = this_machine()
    folder = Path(config.output).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    results = Results(folder, machine)
    for name in config.part or [*PARTS, *EXTRA]:
        if CUT_OFF not in results.parts.get(name, [CUT_OFF]) and not config.again:
            print(f"{name}: done before (--again repeats it)")
            continue
        module, function = PARTS.get(name, ("", ""))
        check = EXTRA.get(name) or getattr(import_module(f"chakra_et.doctor.{module}"), function)
        place = folder / name
        place.mkdir(exist_ok=True)
        print(f"{name}:", flush=True)
        for line in results.add(name, guarded("the part itself", check(place, "GPU" in machine))):
            print(f"  {line.verdict:10}  {line.what}: {line.measured} ({line.expected})", flush=True)
    print(f"{results.page}: {results.bad} of {sum(map(len, results.parts.values()))} checks failed")
    return 1 if results.bad else 0


def this_machine() -> dict[str, str]:
    """Python, PyTorch and, where there is one, GPU and driver."""
    try:
        import torch
    except ImportError:
        print("chakra-et doctor needs PyTorch: pip install torch", file=sys.stderr)
        raise SystemExit(2) from None
    found = {"Python": platform.python_version(), "PyTorch": torch.__version__}
    if torch.cuda.is_available():
        found |= {"GPU": torch.cuda.get_device_name(0), "CUDA": str(torch.version.cuda or torch.version.hip)}
    return found
