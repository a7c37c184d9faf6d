"""The diagnosis of a run: what bounds its step, who is slow, and how much which changes would gain."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from chakra_et.diagnose.busy_time import BusyTime, busy_time
from chakra_et.diagnose.gains import Faster, gain, slowest_rank, step_ms
from chakra_et.diagnose.node_classes import (
    ALLOCATING,
    CLASSES,
    COMMUNICATION,
    COMPILING,
    COMPUTE,
    HOST,
    LOADING,
    MEMORY,
    node_classes,
    on_devices,
)
from chakra_et.et.node_attributes import in_phase
from chakra_et.simulate.breakdown import ACTIVITIES
from chakra_et.simulate.run import Run, together
from chakra_et.simulate.time_by_kind import KINDS
from chakra_et.text import plural, shortened
from chakra_et.transform.overlap import Overlap

CAUSE = 0.15
"""From this gain on, a single cause (a slow rank, input data, …) bounds the step; below, a class of work."""
WORTH = 0.01
"""Changes with less gain aren't listed."""
BUSY = 0.9
DEVICE = -1
"""Arithmetic and memory of the device together."""
LISTED, LONGEST = 3, 80

BOUND_BY = {
    "compute": "arithmetic of the device",
    "memory": "memory of the device",
    "cpu": "operators on the CPU",
    "host": "the host: devices wait for launches",
    "python": "the host outside operators, mostly Python",
    "communication": "communication that nothing hides",
    "rank": "waiting for a slow rank",
    "skew": "ranks that start at different times",
    "bubble": "the bubble of the pipeline",
    "data loading": "input data",
    "compilation": "compilation during the steps",
    "memory allocation": "calls that allocate or free device memory",
    "unknown": "nothing that the files show",
}


@dataclass(frozen=True)
class Kernel:
    """A kernel (on ranks without devices, an operator) by name: ``share`` of the time of all, ``time_ms`` per
    step and rank; ``flops`` and ``bytes_per_s`` over its time, None where the files lack its work."""

    name: str
    kind: str
    share: float
    time_ms: float
    count: float
    flops: float | None
    bytes_per_s: float | None


@dataclass(frozen=True)
class Proposal:
    """``gain``: the part of the step that goes, as predicted; ``flags``: of ``chakra-et predict`` for it,
    empty where it has none."""

    text: str
    gain: float
    flags: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """``bound``: a key of ``BOUND_BY``; ``evidence``: why. ``slow_rank``, and what is gained if it were as
    fast as the median of the others; ``skew_ms``: from the first rank's start to the last one's, and its
    gain; all other gains are of ranks that start together. ``shares``: mean parts of the ranks' time, by
    activity; ``hidden``: the part of communication that compute hides. ``contradictions``: {id: sentence}."""

    name: str
    ranks: int
    steps: int
    step_ms: float
    bound: str
    evidence: str
    slow_rank: int | None
    slow_rank_gain: float
    skew_ms: float
    skew_gain: float
    shares: dict[str, float]
    hidden: float | None
    kernels: list[Kernel]
    proposals: list[Proposal]
    contradictions: dict[str, str]
    uneven_steps: str = ""

    def as_json(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return asdict(self)

    def lines(self) -> list[str]:
        """The diagnosis in a few sentences, the verdict first."""
        found = [f"Bound by {BOUND_BY[self.bound]}. {self.evidence}", *self.about_ranks()]
        if self.proposals:
            found.append("What would help: " + "; ".join(map(_proposed, self.proposals[:LISTED])) + ".")
        if self.kernels:
            found.append("Most time: " + "; ".join(map(_timed, self.kernels)) + ".")
        found += [self.uneven_steps] if self.uneven_steps else []
        return [*found, *(f"Contradiction: {text}" for text in self.contradictions.values())]

    def about_ranks(self) -> list[str]:
        """Which rank is slow, and how far apart the ranks start."""
        found = []
        if self.slow_rank is not None:
            found.append(
                f"Rank {self.slow_rank} is slow: as fast as the median of the others, the step would be "
                f"{self.slow_rank_gain:.0%} shorter."
            )
        elif self.ranks > 1:
            found.append("No rank is slower than the others by as much as 1% of the step.")
        if self.skew_ms >= 0.005 * self.step_ms and self.ranks > 1:
            found.append(
                f"The ranks start up to {self.skew_ms:,.2f} ms apart ({self.skew_gain:.0%} of the step); no "
                "rank is blamed for that."
            )
        return found


def _proposed(each: Proposal) -> str:
    return f"{each.text} (−{each.gain:.0%})"


def _timed(each: Kernel) -> str:
    rate = f", {each.flops / 1e12:.3g} TFLOP/s" if each.flops and each.kind == CLASSES[COMPUTE] else ""
    if not rate and each.bytes_per_s:
        rate = f", {each.bytes_per_s / 1e9:,.0f} GB/s"
    return f"{shortened(each.name, LONGEST)} {each.share:.0%}{rate}"


def diagnose(run: Run) -> Diagnosis:
    """The diagnosis of a run, from predictions of what each change would gain."""
    classes = node_classes(run)
    device = on_devices(run)
    aligned = together(run)
    step = step_ms(run)
    skew = 1 - step_ms(aligned) / step if step else 0.0
    slow = slowest_rank(aligned)
    slow = slow if slow and slow[1] >= WORTH else None
    halved = {
        number: gain(aligned, Faster(classes == number, 0.5)) or 0.0
        for number in (COMPUTE, MEMORY, HOST, COMMUNICATION)
        if (classes == number).any()
    }
    halved[DEVICE] = gain(aligned, Faster(np.isin(classes, (COMPUTE, MEMORY)), 0.5)) or 0.0
    gone = {
        number: gain(aligned, Faster(classes == number, 0.0)) or 0.0
        for number in (LOADING, COMPILING, ALLOCATING)
        if (classes == number).any()
    }
    busy = busy_time(aligned)
    has_device = bool(device.any())
    causes = {CLASSES[number]: value for number, value in gone.items()}
    causes |= {"rank": slow[1] if slow else 0.0, "skew": skew, "bubble": busy.message_wait}
    bound = _bound(causes, halved, has_device)
    found = Diagnosis(
        name=run.name,
        ranks=len(run.graph.ranks),
        steps=max(len(steps.names) for steps in run.steps),
        step_ms=step,
        bound=bound,
        evidence=_evidence(bound, causes, halved, busy, slow),
        slow_rank=slow[0] if slow else None,
        slow_rank_gain=slow[1] if slow else 0.0,
        skew_ms=float(run.release_ns.max(initial=0)) / 1e6,
        skew_gain=max(skew, 0.0),
        shares={name: busy.share(name) for name in ACTIVITIES},
        hidden=busy.hidden,
        kernels=_kernels(run, classes, device),
        proposals=[],
        contradictions={},
        uneven_steps=_uneven(run),
    )
    proposals = sorted(_proposals(aligned, found, classes, device, halved, gone), key=lambda each: -each.gain)
    return replace(
        found, proposals=proposals, contradictions=dict(_contradictions(run, found, busy, has_device))
    )


def _bound(causes: dict[str, float], halved: dict[int, float], has_device: bool) -> str:
    """A cause from ``CAUSE`` on, unless communication or launches that are twice as fast gain more; else the
    class of work that gains most where it takes half as long."""
    cause = max(causes, key=lambda name: causes[name])
    rivals = max((halved.get(number, 0.0) for number in (HOST, COMMUNICATION)), default=0.0)
    if causes[cause] >= CAUSE and causes[cause] >= rivals:
        return cause
    if not halved or max(halved.values()) < WORTH:
        return "unknown"
    # Arithmetic and memory are one device: together they decide, then the larger of both gives its name.
    device = halved[DEVICE]
    most = max((HOST, COMMUNICATION), key=lambda number: halved.get(number, 0.0))
    if halved.get(most, 0.0) > device:
        return "communication" if most == COMMUNICATION else "host" if has_device else "python"
    if not has_device:
        return "cpu"
    return "compute" if halved.get(COMPUTE, 0.0) >= halved.get(MEMORY, 0.0) else "memory"


def _evidence(
    bound: str,
    causes: dict[str, float],
    halved: dict[int, float],
    busy: BusyTime,
    slow: tuple[int, float] | None,
) -> str:
    if bound == "rank" and slow:
        waiting = busy.group_wait + busy.message_wait
        return f"Rank {slow[0]} keeps the others waiting for {waiting:.0%} of their time."
    if bound == "bubble":
        return f"Stages wait {busy.message_wait:.0%} of the time for messages of their neighbours."
    if bound in causes:
        return f"Without that the step would be {causes[bound]:.0%} shorter."
    number = {"cpu": COMPUTE, "python": HOST}.get(bound, CLASSES.index(bound) if bound in CLASSES else -1)
    if number < 0:
        return "Neither device, host nor communication shortens the step by 1% if it is twice as fast."
    parts = ", ".join(
        f"{name} {busy.share(name):.0%}"
        for name in sorted(ACTIVITIES, key=lambda name: -busy.share(name))
        if busy.share(name) >= 0.005
    )
    return f"Twice as fast, it would make the step {halved[number]:.0%} shorter (time of the ranks: {parts})."


def _kernels(run: Run, classes: np.ndarray, device: np.ndarray) -> list[Kernel]:
    """The ``LISTED`` names with the most time, of devices or else of the operators of the CPU."""
    chosen = device if device.any() else run.kind == KINDS.index("operator")
    own = np.where(chosen, run.measured.own_ns, 0)
    spent = np.bincount(run.name_of, own, len(run.names))
    count = np.bincount(run.name_of, chosen, len(run.names))
    operations, moved = (
        np.bincount(
            run.name_of, np.where(chosen, run.graph.attribute(name, 0), 0).astype(float), len(run.names)
        )
        for name in ("num_ops", "tensor_size")
    )
    times = sum(max(len(steps.names), 1) for steps in run.steps)
    found = []
    for name in np.argsort(-spent, kind="stable")[:LISTED].tolist():
        if not spent[name]:
            break
        of = classes[(run.name_of == name) & chosen]
        found.append(
            Kernel(
                run.names[name],
                CLASSES[int(np.bincount(of).argmax())],
                float(spent[name] / max(spent.sum(), 1)),
                float(spent[name] / 1e6 / times),
                float(count[name] / times),
                float(operations[name] / spent[name] * 1e9) or None,
                float(moved[name] / spent[name] * 1e9) or None,
            )
        )
    return found


def _proposals(
    run: Run,
    found: Diagnosis,
    classes: np.ndarray,
    device: np.ndarray,
    halved: dict[int, float],
    gone: dict[int, float],
) -> Iterator[Proposal]:
    """Changes that gain ``WORTH`` or more."""
    tried = [
        Proposal("no data loading in the step's way", gone.get(LOADING, 0.0), "--scale DataLoader=0"),
        Proposal("nothing compiled during the steps", gone.get(COMPILING, 0.0)),
        Proposal("no device memory allocated or freed", gone.get(ALLOCATING, 0.0)),
        Proposal("communication twice as fast", halved.get(COMMUNICATION, 0.0)),
        Proposal("all ranks starting together", found.skew_gain),
    ]
    if COMMUNICATION in halved:
        hidden = gain(run, Overlap(True)) or 0.0
        tried.append(Proposal("all communication hidden behind computation", hidden, "--overlap on"))
    if device.any():
        host = "the host's calls and launches twice as fast, as CUDA graphs would make them"
        tried.append(Proposal(host, halved.get(HOST, 0.0)))
        small = "kernels that memory bounds twice as fast, as fusing them would make them"
        tried.append(Proposal(small, halved.get(MEMORY, 0.0)))
    else:
        tried.append(Proposal("Python between operators twice as fast", halved.get(HOST, 0.0)))
    if found.slow_rank is not None:
        flags = f"--rank {found.slow_rank} as median"
        tried.append(Proposal(f"rank {found.slow_rank} as fast as the others", found.slow_rank_gain, flags))
    for kernel in found.kernels[:1]:
        named = np.array([name == kernel.name for name in run.names])[run.name_of]
        flags = f"--scale '{_pattern(kernel.name, run.names)}'=0.5"
        text = f"{shortened(kernel.name, LONGEST)} twice as fast"
        tried.append(Proposal(text, gain(run, Faster(named & ~run.is_communication, 0.5)) or 0.0, flags))
    if found.skew_ms:
        tried = [
            replace(each, flags=f"{each.flags} --starts together") if each.flags else each for each in tried
        ]
    return (each for each in tried if each.gain >= WORTH)


def _pattern(name: str, names: Sequence[str]) -> str:
    """The shortest beginning of a name that no other name has, as a regular expression."""
    length = next(
        (n for n in range(24, len(name)) if sum(each.startswith(name[:n]) for each in names) == 1), len(name)
    )
    end = "$" if length == len(name) else ""
    return "^" + re.sub(r"([^\w\s:<>,-])", r"\\\1", name[:length]) + end


def _uneven(run: Run) -> str:
    """A sentence where a step lasts much longer than the median one: warm-up, or an outlier."""
    for rank, steps in zip(run.graph.ranks, run.steps, strict=True):
        if steps.measured_ns is None or len(steps.names) < 3:
            continue
        middle = float(np.median(steps.measured_ns))
        most = int(np.argmax(steps.measured_ns))
        ratio = steps.measured_ns[most] / middle if middle else 1.0
        spread = float(np.median(np.abs(steps.measured_ns - middle))) / middle if middle else 0.0
        if ratio >= 1.2 and ratio - 1 >= 5 * spread:
            why = "; the first recorded one, so that it may be warm-up" if most == 0 else ""
            return f"{steps.names[most]} of rank {rank} takes {ratio:.1f} times the median step{why}."
    return ""


def _contradictions(
    run: Run, found: Diagnosis, busy: BusyTime, has_device: bool
) -> Iterator[tuple[str, str]]:
    """What can't be true together, so that the trace or its conversion lacks something."""
    on_device = sum(busy.share(name) for name in ("compute", "memory", "communication"))
    if has_device and on_device >= BUSY and found.bound == "host":
        yield (
            "busy-but-host-bound",
            f"devices are busy for {on_device:.0%} of the time, yet the host bounds the step: waits of the "
            "host may be recorded as its work",
        )
    worlds = [size for trace in run.graph.traces if type(size := trace.metadata.get("world_size")) is int]
    if max(worlds, default=1) > 1 and not run.is_communication.any():
        yield (
            "no-communication",
            f"the run has {plural(max(worlds), 'rank')} and no communication was found: kernels that "
            "communicate may have unknown names, see chakra-et convert --comm-kernels",
        )
    phases = {name: sum(int(in_phase(trace, name).sum()) for trace in run.graph.traces) for name in PHASES}
    if phases[b"optimizer"] and not (phases[b"forward"] and phases[b"backward"]):
        yield ("no-backward", "the optimizer runs, but no forward or backward pass was told apart")


PHASES = (b"forward", b"backward", b"optimizer")
