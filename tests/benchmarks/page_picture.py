"""The top of an audit's page, as headless Chromium draws it: of the demo's first network.

    make demo && python tests/benchmarks/page_picture.py runs/wine-*/audit/report.html

It becomes README's docs/images/page.png, unless --out names another folder.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # where the package of the browser is

from audit.browser import chromium


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("page", type=Path, help="report.html of an audit")
    options.add_argument("--out", type=Path, default=Path(__file__).parents[2] / "docs" / "images")
    chosen = options.parse_args()
    path = chosen.out / "page.png"
    with tempfile.TemporaryDirectory() as folder, chromium(Path(folder)) as browser:
        browser.open(chosen.page.resolve(), width=1100)
        browser.driver.save_screenshot(str(path))
    print(path)


if __name__ == "__main__":
    main()
