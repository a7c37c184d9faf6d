"""The diagnosis of a run: what bounds its step, who is slow, and how much which changes would gain."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from chakra_et.diagnose.gains import (
    Balanced,
    Faster,
    busy_time,
    gain,
    host_path,
    slow_in,
    slow_ranks,
    step_ms,
    uneven_steps,
)
from chakra_et.diagnose.kernel_names import LONGEST
from chakra_et.diagnose.node_classes import BEFORE, CLASSES, LOADING, ON_DEVICE, node_classes
from chakra_et.diagnose.rates import LISTED, Kernel, top_kernels
from chakra_et.et.node_attributes import in_phase
from chakra_et.predict.predict import describe
from chakra_et.simulate.run import Run, together
from chakra_et.text import plural, shortened
from chakra_et.transform.durations import Overlap

CAUSE = 0.15
"""From this gain on, a single cause (a slow rank, input data, …) bounds the step; below, a class of work."""
WORTH = 0.01
"""Changes with less gain aren't listed."""
BUSY, MOSTLY, IDLE, ABOVE = 0.9, 0.8, 0.25, 1.1
NAMED = {"host-overhead": "outside of operators"}
_PHASES = (b"forward", b"backward", b"optimizer")

BOUND_BY = {
    "compute": "arithmetic on the device",
    "memory": "memory bandwidth of the device",
    "cpu": "operators on the CPU",
    "host": "the host: devices wait for launches",
    "python": "the host outside operators, mostly Python",
    "communication": "exposed communication",
    "rank": "waiting for a slow rank",
    "imbalance": "uneven work: ranks are slow in turn",
    "skew": "ranks that start at different times",
    "bubble": "the pipeline bubble",
    "data loading": "input data",
    "compilation": "compilation during the steps",
    "memory allocation": "calls that allocate or free device memory",
    "start-up": "device start-up: calls that create a context or load code",
    "host copies": "copies between the host and the device",
    "unknown": "nothing that the files show",
}
WITHOUT = {
    "data loading": "no waiting for input data",
    "compilation": "nothing compiled during the steps",
    "memory allocation": "no device memory allocated or freed",
    "host copies": "copies between host and device hidden, as by prefetching",
    "start-up": "devices started and code loaded before the step, as by warm-up steps",
    "skew": "all ranks starting together",
    "imbalance": "all ranks with the same work in each step",
}
"""What is proposed against single causes."""


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
    fast as the median of the others, with ``slow_ranks``, where several are; ``slow_in``: the class of work
    that it takes longer for. ``skew_ms``: from the first rank's start to the last one's, and its
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
    proposals: list[Proposal] = field(default_factory=list)
    contradictions: dict[str, str] = field(default_factory=dict)
    uneven_steps: str = ""
    slow_ranks: tuple[int, ...] = ()
    slow_in: str = ""

    def as_json(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return asdict(self)

    def duration(self) -> str:
        """``3 steps, 19.951 ms per step``."""
        of = "per step" if self.steps else "for the whole trace"
        return f"{plural(self.steps, 'step')}, {self.step_ms:,.3f} ms {of}"

    def lines(self) -> list[str]:
        """The diagnosis in a few sentences, the verdict first."""
        found = [f"Bound by {BOUND_BY[self.bound]}. {self.evidence}", *self.about_ranks()]
        if self.proposals:
            listed = "; ".join(f"{each.text} (−{each.gain:.0%})" for each in self.proposals[:LISTED])
            found.append(f"What would help: {listed}.")
        if self.kernels:
            where = "operators" if self.kernels[0].on_cpu else "the device"
            found.append(f"Most time of {where}: {'; '.join(map(str, self.kernels))}.")
        contradictions = (f"Contradiction: {text}" for text in self.contradictions.values())
        return [*found, *filter(None, [self.uneven_steps]), *contradictions]

    def slow_names(self) -> str:
        """The slow ranks, as the beginning of a sentence."""
        *others, last = map(str, sorted(self.slow_ranks))
        return f"Ranks {', '.join(others)} and {last}" if others else f"Rank {last}"

    def about_ranks(self) -> list[str]:
        """Which rank is slow, and how far apart the ranks start."""
        found = []
        if self.slow_rank is not None:
            verb, they = ("are", "they") if len(self.slow_ranks) > 1 else ("is", "it")
            found.append(
                f"{self.slow_names()} {verb} slow, mostly in {self.slow_in} time: as fast as the median of "
                f"the others, {they} would make the step {self.slow_rank_gain:.0%} shorter."
            )
        elif self.ranks > 1:
            turns = "The ranks take turns at being slow: none of them is to blame."
            none = "No rank is slower than the others by as much as 1% of the step."
            found.append(turns if self.bound == "imbalance" else none)
        if self.skew_ms >= 0.005 * self.step_ms and self.ranks > 1:
            found.append(
                f"The ranks start up to {self.skew_ms:,.2f} ms apart, which costs {self.skew_gain:.0%} of "
                "the step and is attributed to no rank."
            )
        return found


def diagnose(run: Run) -> Diagnosis:
    """The diagnosis of a run, from predictions of what each change would gain."""
    classes = node_classes(run)
    device = run.on_devices
    aligned, starts = together(run), " --starts together" if run.release_ns.any() else ""
    if "planned_step_micros" in run.graph.traces[0].metadata:
        run = aligned  # a plan's stages begin with their first messages
    step = step_ms(run)
    skew = 1 - step_ms(aligned) / step if step else 0.0
    slow, slow_gain = slow_ranks(aligned, WORTH)
    balanced = gain(aligned, Balanced())

    def faster(name: str, factor: float) -> float:
        chosen = np.isin(classes, ON_DEVICE) if name == "device" else classes == CLASSES.index(name)
        return gain(aligned, Faster(chosen, factor)) if chosen.any() else 0.0

    gone = {name: faster(name, 0.0) for name in CLASSES[LOADING:]}
    halved = {name: faster(name, 0.5) for name in (*CLASSES[:LOADING], "device")}
    shares, hidden, message_wait = busy_time(aligned)
    has_device = bool(device.any())
    named = {"compute": "kernels", "memory": "copies"} if has_device else {}
    shown = {named.get(name, name): share for name, share in shares.items()}
    causes = gone | {"rank": slow_gain, "skew": skew, "bubble": message_wait - slow_gain}
    causes["imbalance"] = balanced if balanced >= 2 * slow_gain else 0.0  # no few ranks are the cause
    on_path, outside = host_path(aligned, classes)
    bound = _bound(causes, halved, "host" if has_device and outside < 0.5 else "python", has_device)
    if bound == "imbalance":
        slow, slow_gain = [], 0.0
    found = Diagnosis(
        name=run.name,
        ranks=len(run.graph.ranks),
        steps=max(sum("#" in name for name in steps.names) for steps in run.steps),
        step_ms=step,
        bound=bound,
        evidence=_evidence(bound, causes, halved, shown, slow) + _more_evidence(run, bound, on_path, device),
        slow_rank=slow[0] if slow else None,
        slow_rank_gain=slow_gain,
        slow_ranks=tuple(slow),
        slow_in=slow_in(run, classes, slow[0]) if slow else "",
        skew_ms=float(run.release_ns.max(initial=0)) / 1e6,
        skew_gain=max(skew, 0.0),
        shares=shares,
        hidden=hidden,
        kernels=top_kernels(run, classes, device),
        uneven_steps=uneven_steps(run),
    )
    proposals = _proposals(aligned, found, starts, has_device, halved, causes)
    by_gain = sorted(proposals, key=lambda each: -each.gain)
    return replace(found, proposals=by_gain, contradictions=dict(_contradictions(run, found, has_device)))


def _bound(causes: dict[str, float], halved: dict[str, float], host: str, has_device: bool) -> str:
    """A cause from ``CAUSE`` on, unless communication or launches that are twice as fast gain more; else the
    class of work that gains most where it takes half as long."""
    cause = max(causes, key=lambda name: causes[name])
    if cause in CLASSES and causes["rank"] >= MOSTLY * causes[cause]:
        cause = "rank"  # what costs the step time does so on that rank
    other = max(("host", "communication"), key=lambda name: halved[name])
    if causes[cause] >= max(CAUSE, halved[other]):
        return cause
    if max(halved.values()) < WORTH:
        return "unknown"
    # Arithmetic and memory are one device: together they decide, then the larger of both gives its name.
    if halved["device"] < halved[other]:
        return host if other == "host" else other
    if not has_device:
        return "cpu"
    return "compute" if halved["compute"] >= halved["memory"] else "memory"


def _evidence(
    bound: str,
    causes: dict[str, float],
    halved: dict[str, float],
    shares: dict[str, float],
    slow: Sequence[int],
) -> str:
    if bound == "rank" and slow:
        who = f"Rank {slow[0]} keeps" if len(slow) == 1 else f"{len(slow)} ranks keep"
        return f"{who} the others waiting for {shares['wait']:.0%} of their time."
    if bound == "bubble":
        waited = causes["bubble"] + causes["rank"]
        return f"Stages wait {waited:.0%} of the time for messages of their neighbours."
    if bound in causes:
        return f"Without that the step would be {causes[bound]:.0%} shorter."
    if bound == "unknown":
        return "None of device, host and communication would shorten the step by 1% if it were twice as fast."
    gained = halved[{"cpu": "compute", "python": "host"}.get(bound, bound)]
    parts = describe(shares, len(shares))
    return f"Twice as fast, it would make the step {gained:.0%} shorter (time of the ranks: {parts})."


def _more_evidence(run: Run, bound: str, on_path: list[tuple[str, float]], device: np.ndarray) -> str:
    """What the host does on the critical path where it bounds the step; what the files can't tell."""
    metadata = run.graph.traces[0].metadata
    if bound in ("host", "python", "start-up"):
        listed = describe(
            {shortened(NAMED.get(name, name).strip("# "), LONGEST): share for name, share in on_path}
        )
        return f" Of the host's part of the critical path: {listed}." if listed else ""
    if bound == "communication" and run.graph.world_size > len(run.graph.ranks):
        return " Waiting for ranks whose files are missing counts as communication."
    if bound not in ("compute", "memory"):
        return ""
    found, lasts = "", run.graph.duration_ns * device
    if early := lasts[run.named(BEFORE.__eq__)].sum() / max(lasts.sum(), 1):
        found = f" {early:.0%} of the device's time is work from before the recording, of unknown kind."
    if not run.graph.attribute("num_ops", 0)[device].any() and "planned_step_micros" not in metadata:
        found += " The files lack shapes, so that kernels are told apart by their names and tiles alone."
    return found


def _proposals(
    run: Run,
    found: Diagnosis,
    starts: str,
    has_device: bool,
    halved: dict[str, float],
    causes: dict[str, float],
) -> Iterator[Proposal]:
    """Changes that gain ``WORTH`` or more."""
    host = "host calls and launches twice as fast, as with CUDA graphs"
    if found.bound == "python" or not has_device:
        host = "Python between operators twice as fast"
    tried = [(text, causes[cause], "") for cause, text in WITHOUT.items()]
    tried += [
        ("communication twice as fast", halved["communication"], ""),
        ("collectives overlapped with all computation", gain(run, Overlap()), "--overlap"),
        ("memory-bound kernels twice as fast, as by fusion", halved["memory"], ""),
        (host, halved["host"], ""),
    ]
    if found.slow_rank is not None:
        who, flags = found.slow_names().replace("R", "r", 1), f"--rank {','.join(map(str, found.slow_ranks))}"
        tried.append((f"{who} as fast as the others", found.slow_rank_gain, flags))
    for kernel in found.kernels[:1]:
        named = run.named(kernel.name.__eq__)
        value = gain(run, Faster(named & ~run.is_communication, 0.5))
        flags = f"--scale '{_pattern(kernel.name, run.names)}'=0.5"
        tried.append((f"{kernel.shown} twice as fast", value, flags))
    for text, value, flags in tried:
        if value >= WORTH:
            yield Proposal(text, value, flags and flags + starts)


def _pattern(name: str, names: Sequence[str]) -> str:
    """The shortest beginning of a name, from 24 letters on, that no other has, as a regular expression."""
    lengths = (at for at in range(24, len(name)) if sum(each.startswith(name[:at]) for each in names) == 1)
    length = next(lengths, None)
    return "^" + re.sub(r"([^\w\s:<>,-])", r"\\\1", name[:length]) + ("" if length else "$")


def _contradictions(run: Run, found: Diagnosis, has_device: bool) -> Iterator[tuple[str, str]]:
    """What can't be true together, so that the trace or its conversion lacks something."""
    on_device = sum(found.shares[name] for name in ("compute", "memory", "communication"))
    if has_device and on_device >= BUSY and found.bound == "host":
        yield (
            "busy-but-host-bound",
            f"devices are busy for {on_device:.0%} of the time, yet the host bounds the step: waits of the "
            "host may be recorded as its work",
        )
    if found.shares["idle"] >= IDLE:
        yield (
            "idle",
            f"nothing that was recorded runs for {found.shares['idle']:.0%} of the time: threads or earlier "
            "launches may be missing in the trace, or the program waits for input",
        )
    kernel = next((each for each in found.kernels if (each.of_peak or 0) > ABOVE), None)
    if kernel is not None:
        yield (
            "above-peak",
            f"{kernel.shown} reaches {kernel.of_peak:.0%} of the GPU's peak: its data "
            "come from a cache, or its shapes are not what it worked on",
        )
    if run.graph.world_size > 1 and not run.is_communication.any():
        yield (
            "no-communication",
            f"the run has {plural(run.graph.world_size, 'rank')} and no communication was found: kernels "
            "that communicate may have unknown names, see chakra-et convert --comm-kernels",
        )
    phases = {name: sum(int(in_phase(trace, name).sum()) for trace in run.graph.traces) for name in _PHASES}
    if phases[b"optimizer"] and not (phases[b"forward"] and phases[b"backward"]):
        yield ("no-backward", "the optimizer runs, but no forward or backward pass was recognised")
