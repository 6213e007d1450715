"""Prints what is published with a version; fails where its files do not agree, or lack an address.

python .github/release.py v0.1.0              the version's part of the changelog
python .github/release.py v0.1.0 README.md    the file, with links that work outside the repository
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def notes(tag: str, root: Path = ROOT) -> str:
    """Return the changelog's part on the version that a tag names.

    Raises:
        SystemExit: the package or the citation has another version, the changelog no dated part,
            or `[project.urls]` has no address of the repository.
    """
    version = tag.removeprefix("v")
    package = _found(r'__version__ = "(.*)"', root / "adiv_monitor" / "__init__.py")
    cited = _found(r"^version: (.*)$", root / "CITATION.cff")
    if not version == package == cited:
        sys.exit(f"The tag says {version}, the package {package}, CITATION.cff {cited}.")
    _repository(root)
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    part = re.search(
        rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d\n(.*?)(?=^## |\Z)",
        changelog,
        re.DOTALL | re.MULTILINE,
    )
    if part is None:
        sys.exit(f"CHANGELOG.md has no part '## [{version}] - DATE'.")
    return part[1].strip() + "\n"


def linked(file: str, tag: str, root: Path = ROOT) -> str:
    """Return a Markdown file with absolute links: a package index shows README without the rest."""
    address = _repository(root)
    text = (root / file).read_text(encoding="utf-8")
    text = re.sub(r"(!\[[^]]*\]\()(?!\w+:|#)", rf"\g<1>{address}/raw/{tag}/", text)
    return re.sub(r"(?<!!)(\[[^]]*\]\()(?!\w+:|#)", rf"\g<1>{address}/blob/{tag}/", text)


def _repository(root: Path) -> str:
    address = _found(r'^Repository = "(.*?)/?"', root / "pyproject.toml")
    if address == "none":
        sys.exit("pyproject.toml has no Repository in [project.urls].")
    return address


def _found(pattern: str, file: Path) -> str:
    found = re.search(pattern, file.read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else "none"


if __name__ == "__main__":
    tag, *files = sys.argv[1:]
    print(linked(files[0], tag) if files else notes(tag), end="")
