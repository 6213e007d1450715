"""The import graph of the package."""

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "adiv_monitor"

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


def reached(graph: Graph, names: Iterable[str]) -> set[str]:
    """Return all direct and indirect imports of these nodes."""
    found: set[str] = set()
    left = list(names)
    while left:
        new = graph.get(left.pop(), set()) - found
        found |= new
        left += new
    return found
