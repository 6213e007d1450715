"""The import graph of the package, and its drawing in CONTRIBUTING.md: `make schema`."""

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "adiv_monitor"
PAGE = ROOT / "CONTRIBUTING.md"
_BLOCK = re.compile(r"(?<=<!-- drawn by tests/house.py -->\n\n```text\n).*?(?=```)", re.DOTALL)
# Entry points of Python, which only re-export names from other modules.
DOORS = ("__init__", "__main__")

Graph = Mapping[str, set[str]]


def modules() -> dict[str, Path]:
    """Return the files of all modules of the monitor by dotted name."""
    return {_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree(path: Path) -> ast.Module:
    """Return a file's syntax tree, parsed once."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports() -> Graph:
    """Return the modules that each module imports; the package of layers counts as one.

    Imports count wherever they stand: at the top, in a function, or under `TYPE_CHECKING`.
    """
    known = modules()
    return {name: set(imported(path, known)) for name, path in known.items()}


def imported(path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    """Yield a file's imported modules; `from package import name` yields a submodule `name`."""
    for node in ast.walk(tree(path)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            assert node.module is not None
            parts = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [part if part in known else node.module for part in parts]
        for name in names:
            if name in known:
                yield name
            elif name.partition(".")[0] == "adiv_layers":
                yield "adiv_layers"


def room(module: str) -> str:
    """Return the top-level folder or file of `adiv_monitor` that contains a module."""
    package, _, inside = module.partition(".")
    if package != PACKAGE.name:
        return package
    return inside.partition(".")[0] or "__init__"


def between(of: Callable[[str], str], graph: Graph | None = None) -> dict[str, set[str]]:
    """Return the imports between groups of modules, where `of` maps a module to its group."""
    found: dict[str, set[str]] = {}
    for module, others in (imports() if graph is None else graph).items():
        found.setdefault(of(module), set()).update(map(of, others))
    return {name: others - {name} for name, others in found.items()}


def circle(graph: Graph) -> Sequence[str]:
    """Return the nodes of one import cycle, in order; an empty sequence if there is none."""
    done: set[str] = set()

    def walk(way: list[str]) -> Sequence[str]:
        for other in sorted(graph.get(way[-1], ())):
            if other in way:
                return way[way.index(other) :]
            if other not in done and (found := walk([*way, other])):
                return found
        done.add(way[-1])
        return ()

    return next((ring for name in sorted(graph) if (ring := walk([name]))), ())


def from_the_roof(graph: Graph) -> list[str]:
    """Return all nodes in topological order: each before, and near, the nodes it imports."""
    order: list[str] = []

    def walk(name: str) -> None:
        if name not in order:
            for other in sorted(graph.get(name, ()), reverse=True):
                walk(other)
            order.append(name)

    for name in sorted(graph, reverse=True):
        walk(name)
    return order[::-1]


def reached(graph: Graph, names: Iterable[str]) -> set[str]:
    """Return all direct and indirect imports of these nodes."""
    found: set[str] = set()
    left = list(names)
    while left:
        new = graph.get(left.pop(), set()) - found
        found |= new
        left += new
    return found


def picture() -> str:
    """Draw the folders in topological order: each with the folders it imports and its purpose.

    An import that another drawn import implies is left out.
    """
    graph = {name: others for name, others in between(room).items() if name not in DOORS}
    lines = []
    for name in from_the_roof(graph):
        under = graph.get(name, set())
        rests = sorted(under - reached(graph, under))
        lines.append((_shown(name), ", ".join(rests), _purpose(name)))
    first, second = (max(len(line[i]) for line in lines) + 2 for i in (0, 1))
    return "".join(f"{a:<{first}}{b:<{second}}{c}".rstrip() + "\n" for a, b, c in lines)


def _file(name: str) -> Path:
    folder = (ROOT / "layers" if name == "adiv_layers" else PACKAGE) / name
    return folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")


def _shown(name: str) -> str:
    return f"{name}/" if _file(name).name == "__init__.py" else f"{name}.py"


def _purpose(name: str) -> str:
    """Return the first clause of its docstring."""
    said = ast.get_docstring(tree(_file(name))) or ""
    return re.split(r"[:.;](?: |\n|$)", said, maxsplit=1)[0]


def drawn() -> str:
    """Return the text of CONTRIBUTING.md with the current drawing."""
    return _BLOCK.sub(lambda _: picture(), PAGE.read_text(encoding="utf-8"), count=1)


if __name__ == "__main__":
    PAGE.write_text(drawn(), encoding="utf-8")
