"""Generator of the audit page's texts from docs/findings: `make schema`."""

import json
import re
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs" / "findings"
ASSET = ROOT / "adiv_monitor" / "pages" / "assets" / "findings.json"
# Headings of a page, and their keys in the asset.
SECTIONS = {"What it means": "means", "Why it hurts": "hurts", "Known problems": "problems"}


def text() -> str:
    """Return the asset's JSON: finding → section → HTML."""
    pages = sorted(path for path in PAGES.glob("*.md") if path.stem != "README")
    made = {path.stem: sections(path.read_text(encoding="utf-8")) for path in pages}
    return json.dumps(made, ensure_ascii=False, indent=1, sort_keys=True) + "\n"


def sections(page: str) -> dict[str, str]:
    """Return the selected sections as HTML, without links: the audit's page lacks their targets."""
    parts = re.split(r"^## (.+)\n", page, flags=re.MULTILINE)
    found = dict(zip(parts[1::2], parts[2::2], strict=True))
    markdown = MarkdownIt("commonmark", {"html": False})
    return {
        name: re.sub(r"</?a\b[^>]*>", "", markdown.render(found[heading])).strip()
        for heading, name in SECTIONS.items()
        if found.get(heading, "").strip()
    }


if __name__ == "__main__":
    ASSET.write_text(text(), encoding="utf-8")
