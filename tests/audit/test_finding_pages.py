"""The findings' pages quote what the program prints today, in the words of its source."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(p for p in (ROOT / "docs" / "findings").glob("*.md") if p.stem != "README")
PRINTS = (
    "audit/experiments",
    "audit/trials",
    "diagnosis",
    "report",
)  # where the words of findings stand
QUOTED = re.compile(r"> (?:\*\*(?:act|watch|note)\*\*: |- )(.+)")
# Names, places and values of the run, which no source of the program holds.
NAMES = re.compile(
    r"\w+ (?:in '[\w.]+' )?\(\w+\.py:\d+\)|(?:[A-Z]\w+ )?'[\w.\[\]#]*'|\bb?float16\b|\binf\b"
)


@cache
def printed() -> tuple[str, ...]:
    """Return all texts in the source of what is printed, longest first, without their numbers."""
    found: set[str] = set()
    for folder in PRINTS:
        for path in (ROOT / "adiv_monitor" / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found |= {part.strip(" '") for part in re.split(r"\{[^{}]*\}", node.value)}
    return tuple(sorted(filter(None, found), key=len, reverse=True))


def left_over(quote: str) -> list[str]:
    """Return the words of a quote that stand in no text of the source."""
    quote = NAMES.sub("\0", quote)
    for text in printed():
        if text in quote:
            before, after = r"(?<!\w)" * text[0].isalnum(), r"(?!\w)" * text[-1].isalnum()
            quote = re.sub(before + re.escape(text) + after, "\0", quote)
    return re.findall(r"[^\W\d_]{2,}", quote)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_quotes_what_is_printed(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    quotes = [match[1] for line in lines if (match := QUOTED.fullmatch(line))]
    assert len(quotes) == sum(line.startswith("> ") for line in lines), (
        "each is a finding's or advice"
    )
    for quote in quotes:
        assert not left_over(quote), quote
