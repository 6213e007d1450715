"""The words of the field, in what people read: those that were given up do not come back."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent

# What is not to be said → what is. A word joins once it is gone.
EVERYWHERE = {
    r"mend(s|ed|ing)?": "fix",
    r"ill(ness|nesses)?": "fault, faulty",
    r"sick": "faulty",
    r"wards?": "fault benchmark",
    r"takes of the cosine": "lowers the cosine",
    r"lent": "borrowed",
    r"(several|all|single|each|every|first|number of) process(es)?": "rank",
    r"effective rate": "effective learning rate",
    r"dealt": "partitioned across ranks",
    r"idle rows?": "zero-gradient rows (of the measure: `idle_share`)",
    r"by heart": "overfit one batch",
    r"knowing nothing": "the loss of a constant prediction",
    r"made whole": "all-gathered, unsharded",
    r"put(s|ting)? together": "merged (rows, messages), all-gathered (parameters)",
    r"(is|are|be) made of (parameters?|those)": "computed from parameters",
    r"(is|are|was|were|not) told (of|by|what|which|how|that)": "reported, known from, set",
    r"wins? back": "raises",
    r"makings": "weight versions",
    r"leftovers?": "parameters without a rule",
    r"owed": "pending",
    r"standard errors allow to": "if standard errors can tell",
    r"rows? of process": "rank",
}
# Outside of code, where the word may mean something else.
IN_DOCS = {r"remed(y|ies)": "fix"}


def docs() -> Iterator[Path]:
    """Return the texts: Markdown, the notebook, forms, and the pages' templates."""
    for pattern in (
        "*.md",
        "docs/**/*.md",
        "docs/*.ipynb",
        "layers/*.md",
        "examples/**/*.md",
        "tests/**/*.md",
        ".github/**/*",
    ):
        yield from (path for path in ROOT.glob(pattern) if path.is_file())
    yield from ROOT.glob("adiv_monitor/pages/templates/*")


def code() -> Iterator[Path]:
    """Code that users see, in errors and with `help`."""
    for package in ("adiv_monitor", "layers/adiv_layers"):
        yield from (ROOT / package).rglob("*.py")


def found(files: Iterable[Path], words: Iterable[str]) -> list[str]:
    old = re.compile(rf"(?<![\w-])({'|'.join(words)})(?![\w-])", re.IGNORECASE)
    hits = []
    for path in files:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if "data:image" in line or '"image/png"' in line:
                continue
            hits += [f"{path.relative_to(ROOT)}:{number}: {m[0]}" for m in old.finditer(line)]
    return hits


def test_no_old_word_is_in_the_docs() -> None:
    assert found(docs(), [*EVERYWHERE, *IN_DOCS]) == []


def test_no_old_word_is_in_the_code() -> None:
    assert found(code(), EVERYWHERE) == []


def test_an_old_word_is_found(tmp_path: Path) -> None:
    page = ROOT / "README.md"
    assert found([page], ["downhill"])
    assert not found([page], ["downhil"])
