"""How far a plan's micro-batches lie beyond those that were measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


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
