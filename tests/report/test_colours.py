"""Colours that mean something stay apart for people who see no difference between red and green."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

import chakra_et.report

# Machado, Oliveira and Fernandes, 2009: deuteranopia, on linear RGB.
DEUTERANOPIA = np.array(
    [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
)
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
WHITE = np.array([0.9505, 1.0, 1.089])
SHOWN = ("compute", "memory", "communication", "wait", "host")


def lab(colour: str, seen: np.ndarray) -> np.ndarray:
    """CIE L*a*b* of a colour as somebody sees it."""
    value = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    linear = np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)
    xyz = TO_XYZ @ np.clip(seen @ linear, 0, 1) / WHITE
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def css(theme: str = "light") -> dict[str, str]:
    text = (Path(chakra_et.report.__file__).parent / "assets" / "page.css").read_text()
    found: dict[str, str] = {}
    for name, colour in re.findall(r"--([a-z-]+): (#[0-9a-f]{6});", text):
        if theme == "dark":
            found[name.replace("-", " ")] = colour  # the dark page comes last
        found.setdefault(name.replace("-", " "), colour)
    return found


@pytest.mark.parametrize("seen", [np.eye(3), DEUTERANOPIA], ids=["all colours", "deuteranopia"])
@pytest.mark.parametrize("colours", [css(), css("dark")], ids=["light", "dark"])
def test_activities_can_be_told_apart(colours: dict[str, str], seen: np.ndarray) -> None:
    for one, other in itertools.combinations(SHOWN, 2):
        assert np.linalg.norm(lab(colours[one], seen) - lab(colours[other], seen)) > 15, (one, other)
    assert np.linalg.norm(lab(colours["wait"], seen) - lab(colours["idle"], seen)) > 15


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_waiting_stands_out_from_the_page(theme: str) -> None:
    """By 3:1, as WCAG 2.1 wants for graphics."""

    def luminance(colour: str) -> float:
        return ((lab(colour, np.eye(3))[0] + 16) / 116) ** 3  # of colours that are not nearly black

    paper, wait = (luminance(css(theme)[name]) for name in ("paper", "wait"))
    assert (max(paper, wait) + 0.05) / (min(paper, wait) + 0.05) >= 3
