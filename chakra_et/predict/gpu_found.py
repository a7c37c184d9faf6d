"""Which GPU a run was measured on, as far as its files tell."""

from __future__ import annotations

import re
from collections.abc import Iterable

from chakra_et.cost.gpus import Gpu, by_driver, gpu, names
from chakra_et.errors import TraceError
from chakra_et.simulate.run import Run

_VENDORS = {"nvidia": "NVIDIA", "amd": "AMD"}
# Of the names that CUDA and HIP report: "NVIDIA A100-SXM4-80GB", "Tesla V100-SXM2", "AMD Radeon Graphics".
_BRANDS = {
    "nvidia": re.compile(r"nvidia|tesla|geforce|quadro", re.I),
    "amd": re.compile(r"\bamd\b|radeon", re.I),
}
# The runtime whose calls launch kernels.
_CALLS = {"nvidia": re.compile(r"cu(da)?[A-Z]"), "amd": re.compile(r"hip[A-Z]")}


def check_source(run: Run, of: Gpu, flag: str) -> list[str]:
    """A note where the files don't confirm that the run is ``of`` this GPU. Raises ``TraceError`` where
    they name another GPU, or hold the calls of another vendor's runtime."""
    source, mine = of.name, of.vendor
    for rank, trace in zip(run.graph.ranks, run.graph.traces, strict=True):
        name = str(trace.metadata.get("device_name") or run.devices.get(rank, ""))
        vendor = _one(each for each, brand in _BRANDS.items() if brand.search(name))
        named = by_driver(name)
        other = named if source in names() and named not in (None, source) else None
        if other or vendor not in (None, mine):
            known = f": write --gpu {other}:TO" if other else f", which is not among {', '.join(names())}"
            raise TraceError(f"{flag}: rank {rank} ran on {name!r}, not on {source}{known}")
        calls = (text.decode("utf-8", "replace") for text in trace.names.table)
        vendor = _one({each for call in calls for each, begin in _CALLS.items() if begin.match(call)})
        if vendor not in (None, mine):
            here = ", ".join(each for each in names() if gpu(each).vendor == vendor)
            raise TraceError(
                f"{flag}: rank {rank} ran on a GPU of {_VENDORS[vendor or '']}, as its runtime's calls tell, "
                f"and not on {source}: write --gpu FROM:TO with FROM one of {here}"
            )
        if named != source:
            called = f"the run's GPU is called {name!r}" if name else "the files don't name the run's GPU"
            return [f"{called}: that it is {source} is taken from --gpu"]
    return []


def _one(found: Iterable[str]) -> str | None:
    """The only one, None for none or several."""
    known = list(found)
    return known[0] if len(known) == 1 else None
