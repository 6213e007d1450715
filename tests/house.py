"""The house as its imports draw it, and its picture in CONTRIBUTING.md: `make schema`."""

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "adiv_monitor"
PAGE = ROOT / "CONTRIBUTING.md"
_BLOCK = re.compile(r"(?<=<!-- drawn by tests/house.py -->\n\n```text\n).*?(?=```)", re.DOTALL)
# Where Python begins; they only hand on what others hold.
DOORS = ("__init__", "__main__")

Graph = Mapping[str, set[str]]


def modules() -> dict[str, Path]:
    """Dotted name → file, of all modules of the monitor."""
    return {_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports() -> Graph:
    """Module → the modules that it imports: of ours, and the package of layers as one.

    Wherever the import stands: at the top, in a function, or for a checker of types alone.
    """
    known = modules()
    return {name: set(imported(path, known)) for name, path in known.items()}


def imported(path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    """What a file imports; of `from package import name` the module of that name, if it is one."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
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
    """The folder or file of `adiv_monitor` that a module lies in."""
    package, _, inside = module.partition(".")
    if package != PACKAGE.name:
        return package
    return inside.partition(".")[0] or "__init__"


def between(of: Callable[[str], str], graph: Graph | None = None) -> dict[str, set[str]]:
    """The imports between what modules lie in, by whatever tells that."""
    found: dict[str, set[str]] = {}
    for module, others in (imports() if graph is None else graph).items():
        found.setdefault(of(module), set()).update(map(of, others))
    return {name: others - {name} for name, others in found.items()}


def circle(graph: Graph) -> Sequence[str]:
    """Nodes that import each other in a ring, in that order; empty: there is no such ring."""
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
    """All nodes, each before all that it imports, and near to it."""
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
    """All that these import, and what that imports in turn."""
    found: set[str] = set()
    left = list(names)
    while left:
        new = graph.get(left.pop(), set()) - found
        found |= new
        left += new
    return found


def picture() -> str:
    """The rooms from the roof to the ground: each with those that it stands on, and what it is.

    Left out is what a room reaches through another that it stands on.
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
    """The beginning of its docstring, as far as one thing goes."""
    said = ast.get_docstring(ast.parse(_file(name).read_text(encoding="utf-8"))) or ""
    return re.split(r"[:.;](?: |\n|$)", said, maxsplit=1)[0]


def drawn() -> str:
    """CONTRIBUTING.md with the picture of the house as it is."""
    return _BLOCK.sub(lambda _: picture(), PAGE.read_text(encoding="utf-8"), count=1)


if __name__ == "__main__":
    PAGE.write_text(drawn(), encoding="utf-8")
