#!/usr/bin/env python3
"""Whether a change of the code changes a file: digests of everything that the conversion writes.

    python benchmarks/et_bytes.py --save before.json         on the old commit
    python benchmarks/et_bytes.py --compare before.json      on the new one

Converts a copy of every trace fixture and capture of tests/fixtures, and of ../shared/data/traces where that
exists, with the scripts at the root and several sets of flags. Of each file two digests are kept: of its
bytes and, for an .et file, of its nodes alone, as the first message also holds the report's sentences. The
exit status is 1 where a file differs, is missing or is new.
"""

from __future__ import annotations

import gzip
import hashlib
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.digests import Config, saved_or_compared
from chakra_et import cli

FIXTURES = ROOT / "tests" / "fixtures"
SHARED = ROOT.parent / "shared" / "data" / "traces"
ALLOW = ("--allow-missing-ranks", "--workers", "2")
VARIANTS = {
    "default": (),
    "no times": ("--no-timestamps",),
}


@dataclass
class EtConfig(Config):
    nodes_only: bool = field(
        default=False, metadata={"help": "compare the nodes of .et files, and not reports and metadata"}
    )


def main() -> int:
    config = cli.parse(EtConfig, description=__doc__.splitlines()[0])
    return saved_or_compared(config, digests(), config.nodes_only)


def digests() -> dict[str, list[str]]:
    """File → digest of its bytes and digest of its nodes (empty for other files)."""
    found: dict[str, list[str]] = {}
    for variant, flags in VARIANTS.items():
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "traces"
            folder.mkdir()
            collect(folder)
            inputs = {path.name for path in folder.iterdir()}
            subprocess.run(
                [sys.executable, str(ROOT / "convert_to_et.py"), "--dir", "traces", *ALLOW, *flags],
                cwd=scratch, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False,
            )  # fmt: skip
            for path in sorted(folder.iterdir()):
                if path.name not in inputs:
                    found[f"{variant}/{path.name}"] = digest(path)
    return found


def collect(folder: Path) -> None:
    """Copy the runs into one folder, each under a name of its own."""
    for kept in sorted(FIXTURES.glob("traces/*/")) + sorted(FIXTURES.glob("damaged/*/")):
        for path in sorted(kept.glob("run_*")):
            shutil.copy(path, folder / path.name.replace("run", kept.name, 1))
        if not list(kept.glob("run_device.json*")):  # the undamaged trace is kept once for all
            with gzip.open(FIXTURES / "damaged" / "good_device.json.gz") as good:
                (folder / f"{kept.name}_device.json").write_bytes(good.read())
    for kept in sorted(FIXTURES.glob("captures/*/")):
        for path in sorted(kept.glob("tiny_*")):
            shutil.copy(path, folder / f"{kept.name}-{path.name}")
    for pattern in ("dlrm_8gpu/*.json.gz", "dlrm_8gpu_schema_1.0.1/*.json.gz"):
        for path in sorted(SHARED.glob(pattern)):
            name = path.name if "rank0_" not in path.name else path.name.replace("_rank0", "")
            shutil.copy(path, folder / name.replace("rank0", "flat"))


def digest(path: Path) -> list[str]:
    data = path.read_bytes()
    nodes = b""
    if path.suffix == ".et":
        length = shift = at = 0
        while True:  # the varint before the first message
            byte = data[at]
            length |= (byte & 0x7F) << shift
            at, shift = at + 1, shift + 7
            if byte < 0x80:
                break
        nodes = data[at + length :]
    return [hashlib.sha256(data).hexdigest(), hashlib.sha256(nodes).hexdigest() if nodes else ""]


if __name__ == "__main__":
    sys.exit(main())
