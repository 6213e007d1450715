"""The layering of imports: maths imports no hooks, hooks no sinks, and layers no monitor."""

import ast
import re
from pathlib import Path

import house
import pytest
from house import ROOT

# Room by room what it stands on, as drawn: what one of these stands on itself is not named again.
PICTURE = (ROOT / "CONTRIBUTING.md").read_text().partition("## The house in one picture")[2]
ROOMS = {
    room: set(filter(None, under.split(", ")))
    for room, under in re.findall(
        r"^(\w+)(?:/|\.py) +(?:((?:\w+, )*\w+)  )?", PICTURE.split("```")[1], re.MULTILINE
    )
}
# The modules of the audit, from bottom to top.
IN_THE_AUDIT = (
    *("training", "experiments", "trials", "report", "arguments", "run", "audit", "__init__"),
    "command",
)
# Optional packages of the audit, which importing the package must not import.
LATE = {"jinja2", "matplotlib", "rich", "safetensors", "timm", "torchvision"}
LATE |= {"transformers", "yaml", "sklearn", "tensorboard", "accelerate", "lightning", "peft"}
LATE |= {"pytorch_lightning", "scipy", "triton"}
# Pure maths on the host: no tensors, no torch.
PURE = ("maths/attention.py", "maths/estimates.py", "maths/measures.py", "maths/readings.py")

MODULES = house.modules()


def test_imports_point_down_as_drawn() -> None:
    imports = house.between(house.room)
    assert imports.keys() - {"__init__", "__main__"} == ROOMS.keys() - {"adiv_layers"}
    order = list(ROOMS)
    for room, under in ROOMS.items():
        assert all(order.index(room) < order.index(other) for other in under), room
        found = imports.get(room, set())
        assert under <= found <= house.reached(ROOMS, [room]), f"{room} imports {sorted(found)}"


def room_of_the_audit(module: str) -> str:
    inside = module.removeprefix("adiv_monitor.audit")
    return inside.strip(".").partition(".")[0] or "__init__"


def test_the_audits_imports_point_down() -> None:
    upward = {}
    for module in (name for name in MODULES if house.room(name) == "audit"):
        names = {name for name in house.imports()[module] if house.room(name) == "audit"}
        room = room_of_the_audit(module)
        below = IN_THE_AUDIT[: IN_THE_AUDIT.index(room)]
        upward[module] = {room_of_the_audit(name) for name in names} - {room, *below}
    assert len(upward) > 30
    assert {module: rooms for module, rooms in upward.items() if rooms} == {}


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert not house.circle(house.imports())


def test_no_rooms_import_each_other_in_a_circle() -> None:
    assert not house.circle(house.between(house.room))


def test_no_module_hides_what_it_imports() -> None:
    """No module of the package is imported by a computed name."""
    hidden = re.compile(r"import_module\(\s*f?[\"']adiv_")
    assert not [name for name, path in MODULES.items() if hidden.search(path.read_text())]


@pytest.mark.parametrize("name", PURE)
def test_maths_on_the_host_knows_no_tensors(name: str) -> None:
    tree = house.tree(ROOT / "adiv_monitor" / name)
    modules = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules += [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
    assert not any((name or "").split(".")[0] == "torch" for name in modules)


def test_the_layers_know_nothing_of_the_monitor() -> None:
    files = sorted((ROOT / "layers" / "adiv_layers").rglob("*.py"))
    assert files
    for path in files:
        assert set(house.imported(path, MODULES)) <= {"adiv_layers"}, path


def at_the_top(path: Path) -> list[str]:
    """Return the modules that importing this file imports."""
    found = []
    for node in house.tree(path).body:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


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
    assert len(seen) <= 119, "modules of ours: each takes a millisecond or two"
    rooms = {name.split(".")[1] for name in seen if name.startswith("adiv_monitor.")}
    assert not rooms & {"alignment", "diagnosis", "pages", "pictures", "probe"}  # loaded when used
