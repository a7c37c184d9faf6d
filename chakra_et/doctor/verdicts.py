"""The diagnosis, reports and exports of cases that are made to have one answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from chakra_et.diagnose.verdict import diagnose
from chakra_et.doctor.captures import converted, quietly
from chakra_et.doctor.results import Line, equal
from chakra_et.doctor.workload import Workload, launched
from chakra_et.simulate.run import load_run

CASES = {
    "launches": ("host", ("python", "cpu")),
    "copies": ("memory", ("cpu",)),
    "products": ("compute", ("cpu",)),
}
"""Kind of workload → what bounds it on a GPU, and on a CPU."""


def check(folder: Path, on_gpu: bool) -> Iterator[Line]:
    """The verdict, report and export of each case."""
    for kind, (on_device, on_cpu) in CASES.items():
        try:
            launched(Workload(kind, kind=kind, trace=str(folder)))
            converted(folder, kind)
            bound = diagnose(load_run(str(folder / kind))).bound
        except (RuntimeError, OSError, ValueError) as error:
            yield equal(kind, f"failed: {error}", "a capture that converts")
            continue
        expected = (on_device,) if on_gpu else on_cpu
        yield equal(f"{kind}: bound by", bound, bound if bound in expected else " or ".join(expected))
        for command, suffix in (("report", "_report.html"), ("export", ".pftrace")):
            target = folder / f"{kind}{suffix}"
            try:
                quietly([command, str(folder / kind), "-o", str(target)])
                made = "written" if target.stat().st_size > 1000 else "empty"
            except (RuntimeError, OSError) as error:
                made = str(error)
            yield equal(f"{kind}: {command}", made, "written")
