"""Imports point down: maths knows no hooks, hooks know no sinks, layers know no monitor."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# What each room of `adiv_monitor` may import of ours, besides its own neighbours in a folder.
MAY_IMPORT = {
    "report": {"sinks"},  # for `print`, notebooks and `plot`, where that is asked for: see below
    "errors": {"report"},
    "files": set(),
    "printable": set(),
    "alarms": {"report", "sinks"},
    "kernels": {"adiv_layers"},
    "features": {"adiv_layers", "kernels"},
    "maths": {"features", "kernels", "report"},
    "capture": {"adiv_layers", "features", "kernels", "maths"},
    "step": {
        *{"adiv_layers", "alignment", "capture", "errors", "features", "kernels", "maths"},
        *{"printable", "report"},
    },
    "sinks": {
        "audit",
        "files",
        "printable",
        "report",
    },  # what the audit's rules and page are made of: see LOWER
    "alignment": {"capture", "errors", "features", "files", "printable", "report"},
    "max_lr": {
        *{"alignment", "capture", "errors", "lightning_base", "printable", "report", "step"},
    },
    "arguments": {"alignment", "capture", "sinks", "step"},
    "outlet": {"alarms", "report", "sinks", "step"},
    "monitor": {
        *{"alarms", "alignment", "arguments", "capture", "errors", "outlet", "report", "sinks"},
        "step",
    },
    "callback_monitor": {"errors", "monitor", "printable"},
    "lightning_base": set(),
    "lightning": {
        *{"alarms", "alignment", "arguments", "callback_monitor", "capture", "errors"},
        *{"lightning_base", "monitor", "report", "sinks"},
    },
    "huggingface": {
        *{"alarms", "arguments", "callback_monitor", "capture", "errors", "monitor", "sinks"},
    },
    "audit": {
        *{"adiv_layers", "arguments", "capture", "errors", "features", "maths", "monitor"},
        *{"alarms", "alignment", "files", "printable", "report", "sinks", "step"},
    },
    "__init__": {"audit", "errors", "monitor", "report"},
    "__main__": {"audit"},
}
# Of the audit, what sinks may import: pure functions of reports, which know no sink but its words.
LOWER = ("audit.diagnosis", "audit.finding", "audit.page", "audit.record")
# What each room of the audit may import of its others.
IN_THE_AUDIT = {
    "record": {"finding"},
    "diagnosis": {"finding", "record"},
    "training": set(),
    "seen": {"diagnosis", "hidden", "record", "training"},
    "what_if": {"training"},
    "trials": {"diagnosis", "finding", "record", "seen", "training", "what_if"},
    "report": {"finding", "page", "plain", "record", "what_if"},
    "page": {"diagnosis", "hidden", "finding", "record", "report", "what_if"},
    "arguments": set(),
    "audit": {
        *{"arguments", "diagnosis", "finding", "record", "report", "seen", "training", "trials"},
        "what_if",
    },
    "sources": {"command", "training"},
    "command": {"audit", "finding", "hidden", "page", "report", "sources", "training"},
    "finding": set(),
    "hidden": set(),
    "plain": set(),
    "__init__": {"audit", "report"},
}
# What the audit needs only for what it is asked to do, so not when the package is imported.
LATE = {"jinja2", "matplotlib", "rich", "safetensors", "timm", "torchvision"}
LATE |= {"transformers", "yaml", "sklearn", "tensorboard"}
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


def modules(path: Path) -> set[str]:
    """Our own modules that a file imports, by what follows the package's name."""
    nodes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)]
    names = {f"{n.module}.{alias.name}" for n in nodes for alias in n.names}
    return {name.partition(".")[2] for name in names if name.startswith("adiv_monitor.")}


AUDIT = ROOT / "adiv_monitor" / "audit"


@pytest.mark.parametrize(
    "path", sorted(AUDIT.rglob("*.py")), ids=lambda p: str(p.relative_to(AUDIT))
)
def test_the_audits_imports_point_down(path: Path) -> None:
    room = path.relative_to(AUDIT).parts[0].removesuffix(".py")
    names = {name.split(".")[1] for name in modules(path) if name.startswith("audit.")}
    assert names & IN_THE_AUDIT.keys() - {room} <= IN_THE_AUDIT[room]


def test_sinks_know_of_the_audit_only_what_lies_below_them() -> None:
    folder = ROOT / "adiv_monitor"
    for path in (folder / "sinks").glob("*.py"):
        audits = {name for name in modules(path) if name.startswith("audit")}
        assert all(name.startswith(LOWER) for name in audits), path
    lower = [file for name in LOWER for file in folder.glob(name.replace(".", "/") + "*")]
    files = [f for found in lower for f in ([found] if found.is_file() else found.rglob("*.py"))]
    assert len(files) > 20
    for path in files:
        known = {name for name in modules(path) if name.startswith("sinks")}
        # Words, colours, and what healthy layers read, by which rules judge, too.
        below = (
            *("sinks.blocks", "sinks.colours", "sinks.health", "sinks.heat", "sinks.picture"),
            *("sinks.scalars", "sinks.wording"),
        )
        assert all(name.startswith(below) for name in known), path


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


def at_the_top(path: Path) -> list[str]:
    """Modules that a file imports when it is imported itself."""
    found = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


def test_reports_know_of_sinks_only_when_they_are_shown() -> None:
    for path in (ROOT / "adiv_monitor" / "report").glob("*.py"):
        assert not [name for name in at_the_top(path) if "sinks" in name], path


def test_importing_the_package_is_light() -> None:
    seen: set[str] = set()
    left = ["adiv_monitor"]
    while left:
        name = left.pop()
        assert name.split(".")[0] not in LATE, name
        path = ROOT.joinpath(*name.split("."))
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if file.exists() and name not in seen:
                seen.add(name)
                left += at_the_top(file)
    assert "adiv_monitor.audit.audit" in seen
