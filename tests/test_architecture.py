"""Imports point down: maths knows no hooks, hooks know no sinks, layers know no monitor."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# What each room of `adiv_monitor` may import of ours, besides its own neighbours in a folder.
MAY_IMPORT = {
    "report": set(),
    "errors": set(),
    "features": {"adiv_layers"},
    "maths": {"features", "report"},
    "capture": {"adiv_layers", "features", "maths"},
    "step": {"adiv_layers", "capture", "features", "maths", "report"},
    "sinks": {"report"},
    "arguments": {"capture", "sinks", "step"},
    "monitor": {"arguments", "capture", "errors", "report", "sinks", "step"},
    "lightning": {"arguments", "capture", "errors", "monitor", "report", "sinks"},
    "huggingface": {"arguments", "capture", "monitor", "sinks"},
    "audit": {"arguments", "capture", "maths", "monitor", "report", "sinks"},
    "__main__": {"audit"},
    "__init__": {"audit", "errors", "monitor", "report"},
}
# Pure maths on the host: no tensors, no torch.
PURE = ("maths/attention.py", "maths/estimates.py", "maths/measures.py", "maths/readings.py")


def imports(path: Path) -> set[str]:
    """Rooms of `adiv_monitor`, and `adiv_layers`, that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [node.module]
            if node.module == "adiv_monitor":
                names = [f"adiv_monitor.{alias.name}" for alias in node.names]
        for name in names:
            top, _, rest = name.partition(".")
            if top == "adiv_layers":
                found.add(top)
            elif top == "adiv_monitor":
                found.add(rest.partition(".")[0] or "__init__")
    return found


FILES = sorted((ROOT / "adiv_monitor").rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    room = path.relative_to(ROOT / "adiv_monitor").parts[0].removesuffix(".py")
    assert imports(path) - {room} <= MAY_IMPORT[room]


@pytest.mark.parametrize("name", PURE)
def test_maths_on_the_host_knows_no_tensors(name: str) -> None:
    tree = ast.parse((ROOT / "adiv_monitor" / name).read_text())
    modules = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules += [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
    assert not any((name or "").split(".")[0] == "torch" for name in modules)


def test_the_layers_know_nothing_of_the_monitor() -> None:
    files = sorted((ROOT / "layers" / "adiv_layers").rglob("*.py"))
    assert files
    for path in files:
        assert not imports(path) - {"adiv_layers"}, path
