"""Imports point one way: no module needs one that needs it, however late it imports it."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import chakra_et

ROOT = Path(chakra_et.__file__).parent


def imported(path: Path, modules: set[str]) -> set[str]:
    """The modules of chakra_et that a file imports, inside functions too, but not for its types alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = [ast.Pass()]
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            inner = {f"{node.module}.{each.name}" for each in node.names}
            found |= inner & modules or {node.module or ""}
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
    return found & modules


def test_no_module_imports_what_imports_it() -> None:
    paths = {
        ".".join(["chakra_et", *path.relative_to(ROOT).with_suffix("").parts]): path
        for path in ROOT.rglob("*.py")
        if path.name not in ("__init__.py", "__main__.py")
    }
    graph = {name: imported(path, set(paths)) for name, path in paths.items()}
    assert "chakra_et.ranks.contract" in graph["chakra_et.convert.inputs"]
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the modules
    assert order.index("chakra_et.et.file") < order.index("chakra_et.convert.runs")
