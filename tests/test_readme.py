"""Runs every command of the README and of the guides, as small as they go."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from chakra_et.findings import KINDS, TABLE
from tests.shared import shared_path

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"```bash\n(.*?)```", re.DOTALL)
DOCUMENTS = sorted(str(path.relative_to(ROOT)) for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")))
# Names that stand for the reader's own files.
MADE_UP = {"train.py", "run.sh", "gloo/run.sh"}
SMALL = "-- --model-name tiny --dataset sample --max-seq-length 32"


def commands(document: str) -> list[str]:
    text = (ROOT / document).read_text(encoding="utf-8")
    return [line for block in BLOCK.findall(text) for line in block.splitlines() if line.strip()]


def made_small(command: str, folder: Path) -> str:
    """The command as the document has it, on a tiny model and in a scratch folder."""
    command = command.replace(".venv/bin/python", sys.executable)
    command = command.replace(".venv/bin/torchrun", f"{sys.executable} -m torch.distributed.run")
    if command == "./run_gpt2_quick.sh":
        return f"{command} --output-dir {folder} 1 4 {SMALL} --save-dir {folder}/checkpoints"
    if command == "./run_tests.sh":
        return f"{command} --collect-only -q tests/test_readme.py"
    if "train.py" in command:
        command += f" --save-dir {folder}/checkpoints --max-seq-length 32 --trace-output-dir {folder}"
    if re.search(r"(convert_\w+|fix_host_traces)\.py", command) and "--dir" not in command:
        command += f" --dir {folder}"
    return re.sub(r"\boutputs\b", str(folder), command)


def run(command: str, folder: Path = ROOT) -> subprocess.CompletedProcess:
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The README's first command."""
    folder = tmp_path_factory.mktemp("quick")
    first = commands("README.md")[0]
    assert first == "./run_gpt2_quick.sh"
    run(made_small(first, folder))
    return folder


def test_the_readme_s_commands_run_in_order(quick_run: Path) -> None:
    for command in commands("README.md")[1:]:
        run(made_small(command, quick_run))


KOREAN = ("README.md", "USAGE_GUIDE.md", "CHAKRA_SETUP.md", "megatron_lm/README.md")


def said_in_both(document: str) -> dict[str, list[str]]:
    """What two languages have in common: blocks of commands and output, headings, rows of tables, links."""
    text = (ROOT / document).read_text(encoding="utf-8")
    fence = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
    prose = fence.sub("", text)
    # A command or a name stands in code, and numbers and units mean the same.
    cells = re.compile(r"`[^`]+`|(?<![\w`])\d[\d,.]{2,}")
    return {
        "blocks": fence.findall(text),
        "headings": re.findall(r"^#+", prose, re.MULTILINE),
        "tables": [
            " ".join(sorted(cells.findall(line))) for line in prose.splitlines() if line.startswith("|")
        ],
        "links": sorted(link.replace(".ko.md", ".md") for link in re.findall(r"\]\(([^)]+)\)", prose)),
    }


@pytest.mark.parametrize("document", KOREAN)
def test_the_korean_document_has_the_same_commands_tables_and_links(document: str) -> None:
    english, korean = said_in_both(document), said_in_both(document.replace(".md", ".ko.md"))
    for kind, said in english.items():
        assert korean[kind] == said, kind


def test_the_commands_of_chakra_setup_run(quick_run: Path) -> None:
    for command in commands("CHAKRA_SETUP.md"):
        run(made_small(command, quick_run))


def test_the_tutorials_run_in_order_and_their_figures_are_those_of_today(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder with the public traces in place; of figures, those that don't depend on the machine."""
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "pairs").symlink_to(shared_path("data/traces/public/pairs"))
    for folder in ("examples", "fasop", "data"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    said = ""
    for command in commands("docs/TUTORIAL.md"):
        if command.startswith(("pip ", "python scripts/public_traces.py")):
            continue
        command = re.sub(r"^python ", f"{sys.executable} ", command)
        command = re.sub(r"^torchrun", f"{sys.executable} -m torch.distributed.run --standalone", command)
        said += run(re.sub("^chakra-et", f"{sys.executable} -m chakra_et", command), tmp_path).stdout
    text = (ROOT / "docs" / "TUTORIAL.md").read_text(encoding="utf-8")
    printed = re.findall(r"```\n(.*?)```", re.sub(r"```\w+\n.*?```", "", text, flags=re.DOTALL), re.DOTALL)
    stated = {
        line for block in printed for line in block.splitlines() if re.match(r" +\d|It trains|16 files", line)
    }
    assert len(stated) == 5 and stated <= set(said.splitlines())


@pytest.mark.slow
def test_the_commands_of_the_usage_guide_run(quick_run: Path) -> None:
    for command in commands("USAGE_GUIDE.md"):
        run(made_small(command, quick_run))


@pytest.mark.slow
def test_the_examples_of_the_guides_run_on_the_quick_run_of_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for ranks in (1, 2):
        run(
            f"./run_gpt2_quick.sh --cpu --output-dir {tmp_path} {ranks} 6 {SMALL} --save-dir {tmp_path}/saved"
        )
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for document in ("docs/PREDICT.md", "docs/REPORT.md", "docs/STRAGGLERS.md", "docs/SIMULATORS.md"):
        for command in commands(document):
            if not command.startswith("tensorboard "):  # it serves until it is stopped
                small = made_small(command, tmp_path).replace("--dp 64", "--dp 4")
                run(small.replace("chakra-et", f"{sys.executable} -m chakra_et", 1), tmp_path)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_that_a_document_links_or_names_is_there(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    links = {link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link}
    missing = [link for link in links if not (ROOT / document).parent.joinpath(link).exists()]
    # The changelog names what has gone, too.
    named = (
        []
        if document == "CHANGELOG.md"
        else re.findall(r"(?<![\w/.])(?:\./)?((?:\w+/)?\w+\.(?:sh|py))\b", text)
    )
    scripts = set(named) - MADE_UP
    missing += [name for name in scripts if not (ROOT / name).exists() and not list(ROOT.glob(f"*/{name}"))]
    assert not missing


def test_chakra_setup_lists_every_finding_of_a_conversion() -> None:
    text = (ROOT / "CHAKRA_SETUP.md").read_text(encoding="utf-8")
    listed = text.partition("<!-- findings -->\n")[2].partition("<!-- /findings -->")[0].splitlines()[2:]
    of_kind = [(name, kind, text) for each in KINDS for name, (kind, text) in TABLE.items() if kind == each]
    assert listed == [f"| `{name}` | {kind} | {text} |" for name, kind, text in of_kind]
