"""The size of the audit's page, and the time that a browser takes to open it.

A made-up report of 500 layers at 100 measured steps is opened from a file in headless Chromium, in
a window of 1280 by 900. Goals: less than 5 MB; open (the page's `load` event, with its script run
and the visible part drawn) within a second. Each opening is a new document; the first is left out.

    python tests/benchmarks/page.py [--layers N] [--steps N] [--write FILE]
"""

import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from write_up import heading, parser, table, write

sys.path.insert(0, str(Path(__file__).parent.parent))

import example_audits
from audit.browser import chromium

from adiv_monitor.pages import page

_TIMES = (
    "const [page] = performance.getEntriesByType('navigation');"
    "const paint = performance.getEntriesByName('first-contentful-paint')[0];"
    "return [paint ? paint.startTime : null, page.domContentLoadedEventEnd, page.loadEventEnd]"
)


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__ or "")
    options.add_argument("--layers", type=int, default=500)
    options.add_argument("--steps", type=int, default=100)
    arguments = options.parse_args(argv)
    if arguments.quick:
        arguments.layers, arguments.steps = 5, 3
    rounds = 2 if arguments.quick else 11
    names = [f"model.encoder.layers.{i // 4}.{part(i)}" for i in range(arguments.layers)]
    report = example_audits.made_up(names, arguments.steps)
    began = time.perf_counter()
    text = page(report)
    made = time.perf_counter() - began
    found = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.html"
        file.write_text(text, encoding="utf-8")
        with chromium(Path(folder) / "profile") as browser:
            for _ in range(rounds):
                browser.open(file)
                found.append(browser.run(_TIMES))
    rows = [
        ("size", f"{len(text.encode()) / 1e6:.2f} MB", "< 5 MB"),
        ("first paint", seconds([times[0] for times in found[1:]]), ""),
        ("parsed, script run", seconds([times[1] for times in found[1:]]), ""),
        ("open", seconds([times[2] for times in found[1:]]), "< 1 s"),
        ("made by Python", f"{made:.1f} s", ""),
    ]
    lines = heading("The audit's page", __file__, arguments)
    lines += [f"Median, smallest and largest of {rounds - 1} openings.", ""]
    lines += table(("", "found", "goal"), rows)
    print(write(lines, arguments.write), end="")


def part(i: int) -> str:
    return ("attention.query", "attention.value", "intermediate.dense", "output.dense")[i % 4]


def seconds(milliseconds: list[float | None]) -> str:
    known = [value / 1000 for value in milliseconds if value is not None]
    if not known:
        return "–"
    return f"{median(known):.2f} s ({min(known):.2f} to {max(known):.2f})"


if __name__ == "__main__":
    main()
