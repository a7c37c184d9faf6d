"""Predicted over measured times, for each class of kernels, as one SVG of small diagrams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from chakra_et.files import write_text

_WIDE, _HIGH, _GAP, _ACROSS = 260, 130, 46, 3
_RATIOS, _CELLS = 2.0, (52, 26)
"""From a half to twice as long; cells of a diagram."""
_SHADES = 8

Errors = tuple[np.ndarray, np.ndarray]
"""Measured µs, and predicted over measured minus 1."""


def draw(classes: Mapping[str, Sequence[Errors]], path: Path) -> None:
    """Write the picture: measured time across, predicted over measured upwards, both by their logarithms;
    darker where more kernels are."""
    rows = -(-len(classes) // _ACROSS)
    wide, high = _ACROSS * (_WIDE + _GAP) + _GAP, rows * (_HIGH + _GAP) + _GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" font-family="sans-serif" '
        'font-size="11">',
        f'<rect width="{wide}" height="{high}" fill="white"/>',
    ]
    for at, (name, tables) in enumerate(classes.items()):
        micros, errors = (np.concatenate(each) for each in zip(*tables, strict=True))
        left = _GAP + at % _ACROSS * (_WIDE + _GAP)
        top = _GAP + at // _ACROSS * (_HIGH + _GAP)
        parts.append(f'<g transform="translate({left} {top})">')
        parts += [*_diagram(name, micros, 1 + errors), "</g>"]
    write_text(path, "\n".join([*parts, "</svg>"]) + "\n")


def _diagram(name: str, micros: np.ndarray, ratio: np.ndarray) -> Sequence[str]:
    low, high = np.floor(np.log10(micros.min())), np.ceil(np.log10(micros.max()))
    edges = np.linspace(low, high, _CELLS[0] + 1), np.linspace(-1, 1, _CELLS[1] + 1)
    upwards = np.clip(np.log(ratio) / np.log(_RATIOS), -1, 1)
    counts, *_ = np.histogram2d(np.log10(micros), upwards, edges)
    wide, tall = _WIDE / _CELLS[0], _HIGH / _CELLS[1]
    title = name.replace(" with quantisation", "")  # as wide as the diagram
    parts = [f'<text y="-6">{title} ({len(micros):,})</text>']
    shades = np.ceil(np.log1p(counts) / np.log1p(counts.max()) * _SHADES)
    for shade in range(1, _SHADES + 1):
        cells = np.argwhere(shades == shade).tolist()
        drawn = "".join(
            f"M{x * wide:g} {_HIGH - (y + 1) * tall:g}h{wide:g}v{tall:g}h-{wide:g}z" for x, y in cells
        )
        parts.append(f'<path d="{drawn}" fill="#1f4e9e" fill-opacity="{shade / _SHADES:g}"/>')
    parts.append(f'<rect width="{_WIDE}" height="{_HIGH}" fill="none" stroke="#888"/>')
    for text, share in (("2 ×", 0.0), ("1 ×", 0.5), ("½ ×", 1.0)):
        parts.append(f'<text x="-5" y="{_HIGH * share + 4:g}" text-anchor="end">{text}</text>')
    parts.append(f'<path d="M0 {_HIGH / 2:g}H{_WIDE}" stroke="#c00" stroke-dasharray="4 3"/>')
    for power in range(int(low), int(high) + 1):
        x = (power - low) / (high - low) * _WIDE
        parts.append(f'<text x="{x:g}" y="{_HIGH + 14}" text-anchor="middle">{_micros(power)}</text>')
    return parts


def _micros(power: int) -> str:
    return (
        f"{10**power:g} µs"
        if power < 3
        else f"{10 ** (power - 3):g} ms"
        if power < 6
        else f"{10 ** (power - 6):g} s"
    )
