"""What docs/findings say of each finding, as the audit's page carries it: `make schema`."""

import json
import re
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs" / "findings"
ASSET = ROOT / "adiv_monitor" / "pages" / "assets" / "findings.json"
# Headings of a page, and what stands in their place.
SECTIONS = {"What it means": "means", "Why it hurts": "hurts", "Known problems": "problems"}


def text() -> str:
    """The file: finding → section → HTML."""
    pages = sorted(path for path in PAGES.glob("*.md") if path.stem != "README")
    made = {path.stem: sections(path.read_text(encoding="utf-8")) for path in pages}
    return json.dumps(made, ensure_ascii=False, indent=1, sort_keys=True) + "\n"


def sections(page: str) -> dict[str, str]:
    """The sections that are wanted, without links: their targets are not on the audit's page."""
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
