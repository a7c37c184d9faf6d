"""A job from what the user names: a run of .et files, or a Parquet trace with its YAML file."""

from __future__ import annotations

from pathlib import Path

from chakra_et.errors import TraceError
from chakra_et.et.sets import Skeletons, find_rank_sets
from chakra_et.stragglers.analyse import Stragglers, analyse
from chakra_et.stragglers.operations import Job, Typical
from chakra_et.stragglers.parquet import read_meta, read_trace
from chakra_et.stragglers.pipeline import pipeline_job
from chakra_et.stragglers.recorded import recorded_job

SUFFIX = ".parquet"


def read_job(
    name: str, meta: str | None = None, allow_missing: bool = False, skeletons: Skeletons = "auto"
) -> Job:
    """The job of run ``name`` (files NAME.0.et, …), or of a ``.parquet`` trace and its YAML file ``meta``.

    Raises ``TraceError`` for files that can't be read, or are not one whole job, the latter unless
    ``allow_missing``.
    """
    if name.endswith(SUFFIX):
        if meta is None:
            raise TraceError(
                f"{name}: a Parquet trace does not describe its job: give its YAML file with --meta"
            )
        return pipeline_job(read_trace(Path(name)), read_meta(Path(meta)))
    if meta is not None:
        raise TraceError(f"{name}: --meta is for Parquet traces ({SUFFIX}): leave it out for .et files")
    return recorded_job(find_rank_sets([name], allow_missing, skeletons)[0])


def find_stragglers(
    name: str,
    meta: str | None = None,
    compute: Typical = "mean",
    threshold: float = 1.03,
    allow_missing: bool = False,
    skeletons: Skeletons = "auto",
) -> Stragglers:
    """``analyse`` of ``read_job``: ``find_stragglers("outputs/NAME").rank_by_step.slowdown`` is the heat
    map."""
    return analyse(read_job(name, meta, allow_missing, skeletons), compute, threshold)
