#!/usr/bin/env python3
"""Downloads real traces from the repositories that publish them, each by commit and sha256.

    python scripts/public_traces.py [FOLDER]                  all of them, 14 MB
    python scripts/public_traces.py --only 'pairs/*'
    python scripts/public_traces.py --base file:///MIRROR     from MIRROR/OWNER/REPOSITORY/COMMIT/PATH
    python scripts/public_traces.py FOLDER --tables           measured kernels and collectives instead, for
                                                              benchmarks/cost_accuracy.py --given FOLDER

The traces are under the MIT licence of their repositories: AMD-AGI/TraceLens,
facebookresearch/HolisticTraceAnalysis and facebookresearch/param; ``public_tables.py`` has the tables. A file
that is there already is kept if its sha256 is right. The exit status is 1 if a file could not be had.
``benchmarks/corpus_benchmark.py FOLDER`` converts the traces.
"""

from __future__ import annotations

import fnmatch
import hashlib
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from chakra_et import cli
from chakra_et.errors import TraceError
from chakra_et.files import atomic_file
from scripts.public_tables import fetch_tables

GITHUB = "https://github.com"
RAW = "https://raw.githubusercontent.com"
TIMEOUT_S = 60
MAX_BYTES = 64 << 20


class Trace(NamedTuple):
    """``name``: the file's path here; ``source``: OWNER/REPOSITORY/COMMIT/FOLDER; ``path``: in it."""

    name: str
    source: str
    path: str
    sha256: str


HTA = "facebookresearch/HolisticTraceAnalysis/f4d0062/tests/data"
# Name, path and sha256 of each file of a source.
SOURCES = {
    HTA: """
        a100_alexnet_cuda_sync.json.gz critical_path/alexnet/benchmark_result_2869224_1695835535_trace.json.gz
            b9febb1abc8cc729a2890fb6a4171de9867ba72c944437ee046067e7c89912dc
        a100_nccl_rank0.json.gz nccl_parser_config/nccl_data.json.gz
            c1cf9c575fdcd7bdc6326ceab834f94b351f81ae55577a7471aa9e328fb8b58e
        sampled_rank0_of_128.json.gz trace_filter/sampled_rank-0.json.gz
            71b98c30a2751cc56d9bf78f8fb76467acd56e0be6a1f0da23c600941d29aafd
        mi250_minitoy.json.gz amd_trace/mi250_minitoy_train_ROCm6_2_kineto.json.gz
            39fdab670f9e80a05ccc6d0d07611b3aeba1092fa10681d8dd08cea48d0488b5
    """,
    "facebookresearch/param/1e115ff/et_replay/tests/inputs": """
        linear_2080ti/linear_device.json.gz linear_kineto.json.gz
            c2c4a2661c767ca22e89f18c945b7ba9aeb9d050b2e48f9adfbb2c45a59a9d42
        linear_2080ti/linear_host.json.gz linear_et.json.gz
            efdcec34fd5fc6ab424816b850f34764deebbe0ba032da2e2635ca5f615193b8
    """,
    "AMD-AGI/TraceLens/171dd747/tests/traces": """
        b200_eager_rank0.json.gz b200/eager_trace.json.gz
            7f5e9c9dc4ba71371fde1d947204134575b05d7a614986f249fa8142663c7ca2
        vllm_decode_full/graph_capture_rank_0.json.gz
            inference/vllm_decode_full/capture_traces/graph_capture_rank_0.1773709742341309550.pt.trace.json.gz
            1324913759fbb1a80c9b9b7bb6fb2c8c3e8cbf0443af4d9a5abf03c94ae82961
        pairs/h100_bert-small-uncased.json.gz h100/gaunernst_bert-small-uncased__1016001.json.gz
            309220b5130afa8bc5151252fb1fc3fc9fe6cdc099a07854c0c157e03abb4233
        pairs/mi300_bert-small-uncased.json.gz mi300/gaunernst_bert-small-uncased__1016001.json.gz
            32f123ef8a3d14c8352b43bd540fe42b4a9e07225700af5e261e29b4de9e6f8c
        pairs/h100_owlv2-large-patch14-ensemble.json.gz
            h100/google_owlv2-large-patch14-ensemble__1016001.json.gz
            959efc7b235d78c5a22ad94c689175a4f5a4c1592edd5e2df6dafdd9098d5a10
        pairs/mi300_owlv2-large-patch14-ensemble.json.gz
            mi300/google_owlv2-large-patch14-ensemble__1016001.json.gz
            17e915071698f3cbec631179a7b31456fffb98a28b68340fc09e09687e5c7714
        pairs/h100_timesformer-base-finetuned-k400.json.gz
            h100/facebook_timesformer-base-finetuned-k400__1016002.json.gz
            c2d1d7fea329b45adf2d065875c817e02cbc19ed6c7d19eef3fd5e3364112e87
        pairs/mi300_timesformer-base-finetuned-k400.json.gz
            mi300/facebook_timesformer-base-finetuned-k400__1016002.json.gz
            cddbdd83d4e6078430d6e5f94c520a00371abf299d25a726799fae665302a55d
    """,
}
TRACES = tuple(
    Trace(name, source, path, sha256)
    for source, words in ((source, text.split()) for source, text in SOURCES.items())
    for name, path, sha256 in zip(words[::3], words[1::3], words[2::3], strict=True)
)


@dataclass
class Config:
    folder: str = cli.option("where the traces go", "outputs/public_traces", positional=True)
    only: str = cli.option("names to download, as a shell pattern", "*")
    base: str = cli.option(f"address of a mirror; without one, with --tables {GITHUB}", RAW)
    tables: bool = cli.option("fetch tables of measured kernels and collectives instead", False)


def main() -> int:
    config = cli.parse(Config, description=__doc__)
    if not config.tables:
        return cli.run(lambda: download(config), TraceError)
    base = GITHUB if config.base == RAW else config.base
    return cli.run(lambda: fetch_tables(Path(config.folder), base), TraceError)


def download(config: Config, traces: tuple[Trace, ...] = TRACES) -> int:
    """Fetch what is not there yet; returns the exit status. Raises ``TraceError`` if no name fits."""
    chosen = [trace for trace in traces if fnmatch.fnmatchcase(trace.name, config.only)]
    if not chosen:
        raise TraceError(f"--only {config.only!r} fits no trace: {', '.join(trace.name for trace in traces)}")
    failed = 0
    for trace in chosen:
        path = Path(config.folder) / trace.name
        try:
            print(f"{path}: {fetch(trace, path, config.base)}")
        except TraceError as error:
            failed += 1
            print(f"error: {error}", file=sys.stderr)
    print(f"{len(chosen) - failed} of {len(chosen)} traces are in {config.folder}.")
    return 1 if failed else 0


def fetch(trace: Trace, path: Path, base: str = RAW) -> str:
    """Make ``path`` the trace; returns "kept" or "downloaded". Raises ``TraceError`` where that can't be."""
    if path.exists():
        if hashlib.sha256(path.read_bytes()).hexdigest() == trace.sha256:
            return "kept"
        raise TraceError(f"{path}: there is another file of that name: remove it, or give another folder")
    url = f"{base.rstrip('/')}/{trace.source}/{trace.path}"
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            content = answer.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", error)  # of a URLError
        raise TraceError(f"{url}: can't be downloaded ({why}): check the network, or give --base") from None
    found = hashlib.sha256(content).hexdigest()
    if found != trace.sha256:
        raise TraceError(f"{url}: its sha256 is {found}, not {trace.sha256}: not used")
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        file.write(content)
    return "downloaded"


if __name__ == "__main__":
    sys.exit(main())
