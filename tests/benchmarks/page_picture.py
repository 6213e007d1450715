"""A picture of the top of an audit's page in headless Chromium, for the demo's first network.

    make demo && python tests/benchmarks/page_picture.py runs/wine-*/audit/report.html

It becomes README's docs/images/page.png, unless --out names another folder.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # location of the browser's package

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
