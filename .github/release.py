"""Prints a version's part of the changelog; fails where tag, package and citation do not agree.

python .github/release.py v0.1.0
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def notes(tag: str, root: Path = ROOT) -> str:
    """What the changelog says of the version that a tag names.

    Raises:
        SystemExit: the package or the citation has another version, or the changelog no dated part.
    """
    version = tag.removeprefix("v")
    package = _found(r'__version__ = "(.*)"', root / "adiv_monitor" / "__init__.py")
    cited = _found(r"^version: (.*)$", root / "CITATION.cff")
    if not version == package == cited:
        sys.exit(f"The tag says {version}, the package {package}, CITATION.cff {cited}.")
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    part = re.search(
        rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d\n(.*?)(?=^## |\Z)",
        changelog,
        re.DOTALL | re.MULTILINE,
    )
    if part is None:
        sys.exit(f"CHANGELOG.md has no part '## [{version}] - DATE'.")
    return part[1].strip() + "\n"


def _found(pattern: str, file: Path) -> str:
    found = re.search(pattern, file.read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else "none"


if __name__ == "__main__":
    print(notes(sys.argv[1]), end="")
