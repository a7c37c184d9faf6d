"""How far a plan's layers lie beyond what their costs were measured or checked on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fasop.inputs.models import Model

# Of the published runs on A100 that computed times are checked on (benchmarks/planner_accuracy.py): tokens of
# a micro-batch, and the narrowest and widest side of a matrix on one GPU.
TOKENS, WIDTHS = (4096, 131072), (192, 32768)


def beyond_curve(model: Model, gpu: str, tp: int, mbs: int) -> str:
    """Where the layers' matrix products lie outside the checked range; nothing where they lie inside."""
    tokens = mbs * model.seq * (model.top_k / model.experts if model.experts else 1)
    ffn = model.ffn_width // tp
    sides = (model.hidden, model.width // tp, ffn, ffn * (2 if model.gated else 1))
    found = [
        _beyond(tokens, TOKENS, "tokens"),
        _beyond(min(sides), WIDTHS, "wide"),
        _beyond(max(sides), WIDTHS, "wide"),
    ]
    far = ", ".join(dict.fromkeys(filter(None, found)))
    return f"{gpu}: products beyond those that the efficiency curve was checked on ({far})" if far else ""


def beyond_measured(gpu: str, batch: float, sizes: Sequence[float]) -> str:
    """Where a micro-batch lies outside the measured ones; nothing where it lies inside."""
    far = _beyond(batch, (min(sizes), max(sizes)), "sequences")
    return f"{gpu}: micro-batch beyond the measured ones ({far})" if far else ""


def _beyond(value: float, checked: tuple[float, float], what: str) -> str:
    least, most = checked
    if value < least:
        return f"{value:g} {what}, {least / value:.3g} times below {least:g}"
    return f"{value:g} {what}, {value / most:.3g} times above {most:g}" if value > most else ""


def counted(found: Iterable[tuple[str, int]]) -> list[str]:
    """One sentence for each text, of a stage with so many layers, that says how many there are."""
    stages: dict[str, list[int]] = {}
    for text, layers in found:
        if text:
            stages.setdefault(text, []).append(layers)
    return [
        f"{text}: {sum(layers)} layers in {len(layers)} stage{'s' * (len(layers) > 1)}"
        for text, layers in stages.items()
    ]
