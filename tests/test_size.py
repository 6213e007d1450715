"""No part of the package grows beyond its ceiling: what is added replaces something."""

import ast
from collections.abc import Sequence
from pathlib import Path

import house
import pytest

PACKAGE = Path(__file__).parents[1] / "adiv_monitor"
# Part: its folders and files, and the most code lines that it may have. A ceiling only goes down.
CEILINGS: dict[str, tuple[Sequence[str], int]] = {
    "audit and diagnosis": (("audit", "diagnosis"), 9_000),
    "pages, pictures, sinks": (("pages", "pictures", "sinks"), 2_340),
    "max_lr": (("max_lr",), 1_250),
    "core": (("alignment", "capture", "features", "maths", "probe", "rerun", "step"), 8_880),
    "report and top level": ((), 2_055),  # the rest
}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(source: str, tree: ast.Module) -> int:
    """Return the number of lines that are not blank, and hold more than comments and docstrings."""
    lines = enumerate(source.splitlines(), start=1)
    code = {i for i, line in lines if line.strip() and not line.lstrip().startswith("#")}
    docs: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.JoinedStr):  # no comment begins in a long string
            code |= set(range(node.lineno, (node.end_lineno or 0) + 1))
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docs |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(code - docs)


def part_of(path: Path) -> str:
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    named = (name for name, (rooms, _) in CEILINGS.items() if room in rooms)
    return next(named, "report and top level")


@pytest.mark.parametrize("part", CEILINGS)
def test_a_part_stays_below_its_ceiling(part: str) -> None:
    paths = [path for path in PACKAGE.rglob("*.py") if part_of(path) == part]
    lines = sum(code_lines(path.read_text(encoding="utf-8"), house.tree(path)) for path in paths)
    assert paths and lines <= CEILINGS[part][1], f"{part} has {lines} code lines"
