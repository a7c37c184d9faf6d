"""The page of a run of very many ranks: no nodes, but the time of each rank and step, and who stands out.

A rank's own time in a step is what it neither waits nor exchanges data. Ranks stand out by robust statistics
(Iglewicz and Hoaglin, 1993): by how many scaled median absolute deviations they lie above the median rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from chakra_et.diagnose.verdict import Diagnosis
from chakra_et.errors import TraceError
from chakra_et.et.sets import read_comm_groups
from chakra_et.files import read_json
from chakra_et.job.mesh import Mesh, mesh_of
from chakra_et.names import RunFiles
from chakra_et.report.page import MADE_BY, PackedColumns
from chakra_et.text import duration, plural

MOST_NODES = 256
"""Of more ranks than these, ``report`` writes this page."""
PARTS = ("compute", "memory", "communication", "wait", "rest")
OWN = ("compute", "memory", "rest")
NODE = 8
"""Ranks of a node, where the run doesn't say: as most GPU nodes have."""
SCALE, DEVIATIONS, LEAST = 1.4826, 5.0, 0.02
OFTEN = 0.1
"""Of the steps: a rank that is slow in more stands out, too."""
BESIDE, NAMED, LISTED = 3, 10, 100


def many_content(
    files: RunFiles, found: Mapping[str, np.ndarray], diagnosis: Diagnosis
) -> tuple[dict[str, Any], PackedColumns]:
    """The JSON and the columns of the page, from what ``ranks.table.step_table`` found."""
    ranks, steps = np.unique(found["rank"]), np.unique(found["step"])
    at = np.searchsorted(ranks, found["rank"]), np.searchsorted(steps, found["step"])
    parts = np.full((len(PARTS), len(ranks), len(steps)), np.nan)
    for number, part in enumerate(PARTS):
        parts[number][at] = found[f"{part}_ns"]
    own = parts[[PARTS.index(part) for part in OWN]].sum(axis=0)
    mesh, notes = _mesh(files, len(ranks))
    listed = outliers(ranks, parts, own, mesh)
    mean = np.nanmean(parts, axis=2)
    by_own = np.argsort(-np.nanmedian(own, axis=1), kind="stable").tolist()
    others = [each for each in by_own[BESIDE:] if ranks[each] not in diagnosis.slow_ranks]
    middle = others[max(len(others) - BESIDE, 0) // 2 :][:BESIDE]
    names = ", ".join(str(each["rank"]) for each in listed[:NAMED]) + ", …" * (len(listed) > NAMED)
    columns = PackedColumns()
    columns.add("own", np.nan_to_num(own / 1000).round().reshape(-1))
    content = {
        "name": files.name,
        "made_by": MADE_BY,
        "headline": [
            f"{plural(len(ranks), 'rank')}, {plural(len(steps), 'step')}: "
            f"{duration(diagnosis.step_ms * 1e6)} per step.",
            *diagnosis.lines(),
            f"Ranks that stand out: {len(listed)}{f' ({names})' if listed else ''}.",
        ],
        "diagnosis": diagnosis.as_json(),
        "notes": notes,
        "ranks": ranks.tolist(),
        "steps": steps.tolist(),
        "parts": PARTS,
        "node": NODE,
        "mesh": None if mesh is None else str(mesh),
        "axes": _axes(ranks, own, mesh),
        "outliers": listed[:LISTED],
        "beside": [
            {"rank": int(ranks[each]), "typical": typical, "parts_ns": mean[:, each].round().tolist()}
            for typical, chosen in ((False, by_own[:BESIDE]), (True, middle))
            for each in chosen
        ],
    }
    return content, columns


def outliers(
    ranks: np.ndarray, parts: np.ndarray, own: np.ndarray, mesh: Mesh | None
) -> list[dict[str, Any]]:
    """The ranks that stand out, the slowest first. ``parts`` [part, rank, step], ``own`` [rank, step], ns.

    ``excess``: how much more own time than the median rank it has, as a part of it, in its median step;
    ``deviations``: in scaled median absolute deviations; ``steps``: in how many steps it stands out;
    ``mostly``: the part of its time that exceeds the median rank's the most; ``place``: in the mesh.
    """
    excess = own / np.maximum(np.nanmedian(own, axis=0), 1) - 1
    score = np.nanmedian(excess, axis=1)
    score -= np.median(score)
    deviations = score / max(SCALE * float(np.median(np.abs(score))), 1e-9)
    # Slow in the median step, or in some, as by throttling or garbage collection.
    limit = np.maximum(DEVIATIONS * SCALE * np.nanmedian(np.abs(excess), axis=0), LEAST)
    slow_steps = (excess > limit).sum(axis=1)
    often = slow_steps > max(1.0, OFTEN * own.shape[1])
    mean = np.nanmean(parts, axis=2)[[PARTS.index(part) for part in OWN]]
    mostly = (mean - np.median(mean, axis=1, keepdims=True)).argmax(axis=0)

    def place(rank: int) -> str:
        axes = () if mesh is None else zip(("tp", "dp", "pp"), mesh.place(rank), strict=True)
        return ", ".join(f"{axis} {number}" for axis, number in axes)

    return [
        {
            "rank": int(ranks[at]),
            "excess": float(score[at]),
            "deviations": float(deviations[at]),
            "steps": int(slow_steps[at]),
            "mostly": OWN[mostly[at]],
            "place": place(int(ranks[at])),
        }
        for at in np.argsort(-score, kind="stable").tolist()
        if often[at] or (deviations[at] > DEVIATIONS and score[at] > LEAST)
    ]


def _mesh(files: RunFiles, world: int) -> tuple[Mesh | None, list[str]]:
    """The mesh as the groups show it, or why there is none."""
    try:
        groups = read_comm_groups(files.groups_file)
        manifest = read_json(files.manifest_file) if files.manifest_file.is_file() else {}
        entries = manifest.get("process_groups", [])
        described = {str(each.get("description")): each["ranks"] for each in entries}
        return mesh_of(groups, described, set(), world), []
    except (TraceError, OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        return None, [f"no axes of the mesh: {error}"]


def _axes(ranks: np.ndarray, own: np.ndarray, mesh: Mesh | None) -> list[dict[str, Any]]:
    """The mean own time of a step by place along each axis of the mesh, node, and place in a node."""
    places = {"node": ranks // NODE, "place in the node": ranks % NODE}
    if mesh is not None:
        of_rank = np.array([mesh.place(rank) for rank in ranks.tolist()])
        places = {"tp": of_rank[:, 0], "dp": of_rank[:, 1], "pp": of_rank[:, 2]} | places
    mean = np.nanmean(own, axis=1)
    found = []
    for axis, place in places.items():
        pairs = zip(np.bincount(place, mean).tolist(), np.bincount(place).tolist(), strict=True)
        means = [round(ns / ranks) if ranks else None for ns, ranks in pairs]
        if len(means) - means.count(None) > 1:
            found.append({"axis": axis, "ns": means})
    return found
