"""Each layer imports only the layers below it; heavy packages stay out of the light ones."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("core", "memory", "attention", "workloads", "execution", "engine", "generate", "bench", "cli")
SIBLINGS = {"generate": {"bench"}, "bench": {"generate"}}
HEAVY = {"torch", "transformers", "numba", "pandas", "cupy", "datasets", "matplotlib"}
PURE = ("core", "memory")


def sources() -> list[tuple[str, Path]]:
    found = [(path.parent.name, path) for path in (ROOT / "pagedcli").glob("*/*.py")]
    found += [("workloads", path) for path in (ROOT / "workloads").glob("*.py")]
    return sorted(item for item in found if item[0] in LAYERS)


def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def used_layers(path: Path) -> set[str]:
    parts = [name.split(".") for name in imports(path) if name.startswith("pagedcli.")]
    return {part[1] for part in parts if part[1] in LAYERS}


@pytest.mark.parametrize(("layer", "path"), sources(), ids=lambda item: str(getattr(item, "name", item)))
def test_imports_point_down(layer: str, path: Path) -> None:
    allowed = set(LAYERS[: LAYERS.index(layer) + 1]) - SIBLINGS.get(layer, set())
    assert used_layers(path) <= allowed, f"{path.relative_to(ROOT)} imports upward"


@pytest.mark.parametrize("layer", PURE)
def test_pure_layers_import_nothing_heavy(layer: str) -> None:
    for name, path in sources():
        if name == layer:
            assert not {item.split(".")[0] for item in imports(path)} & HEAVY, path


def test_only_the_command_line_prints() -> None:
    for layer, path in sources():
        if layer == "cli":
            continue
        calls = [node for node in ast.walk(ast.parse(path.read_text()))
                 if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"]
        assert not calls, f"{path.relative_to(ROOT)} prints"
