"""Imports point down: maths knows no hooks, hooks know no sinks, layers know no monitor."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# What each room of `adiv_monitor` may import of ours, besides its own neighbours in a folder.
MAY_IMPORT = {
    "estimates": set(),
    "measures": {"estimates"},
    "report": set(),
    "errors": set(),
    "eager": set(),
    "hook": set(),
    "features": {"adiv_layers"},
    "ceiling": {"features"},
    "selection": {"features"},
    "dots": {"features"},
    "totals": {"features"},
    "sampling": {"features"},
    "transfer": set(),
    "updates": {"dots", "features"},
    "accumulation": {"dots", "updates"},
    "layer_rows": {"ceiling", "features", "sampling"},
    "capture": {
        *("accumulation", "adiv_layers", "dots", "features", "hook", "layer_rows", "selection"),
    },
    "plain_step": {"features", "selection"},
    "readings": {"estimates", "features", "measures", "report", "transfer"},
    "outcome": {"features", "readings", "report", "transfer", "updates"},
    "measured_step": {
        *("adiv_layers", "capture", "dots", "features", "layer_rows", "outcome", "plain_step"),
        "selection",
        *("totals", "transfer", "updates"),
    },
    "sinks": {"report"},
    "stepping": set(),
    "schedule": set(),
    "arguments": {"selection", "sinks", "stepping"},
    "monitor": {
        *("arguments", "capture", "eager", "errors", "hook", "measured_step", "report"),
        *("schedule", "selection", "sinks", "stepping", "updates"),
    },
    "lightning": {"arguments", "errors", "monitor", "report", "selection", "sinks"},
    "__init__": {"errors", "monitor", "report"},
}


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


def test_the_layers_know_nothing_of_the_monitor() -> None:
    files = sorted((ROOT / "layers" / "adiv_layers").rglob("*.py"))
    assert files
    for path in files:
        assert not imports(path) - {"adiv_layers"}, path
