"""The page in a browser: sorting, filtering, light and dark, the heat map; a silent console."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("jinja2", reason="makes the page")
pytest.importorskip("matplotlib", reason="draws its pictures")

import example_audits
from audit.browser import Browser, chromium

from adiv_monitor.pages import compare, page

pytestmark = pytest.mark.slow
COLUMN = "#layer-table thead tr:last-child th:nth-child({}) button"
LAYERS = ["encoder.0", "encoder.1", "encoder.10", "head"]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    plain = example_audits.made_up(LAYERS, 6)
    hostile = example_audits.made_up(list(example_audits.HOSTILE), 4)
    texts = {
        "plain": page(plain),
        "hostile": page(hostile),
        "compare": compare(plain, hostile, ("<i>a</i>", "b")),
    }
    runs = [example_audits.known_by_reports(seed) for seed in (0, 1)]
    texts["trainings"] = compare(*runs, ("a", "b"))
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def _quiet(browser: Browser, files: Path) -> Iterator[None]:
    yield
    assert browser.errors() == []
    assert [url for url in browser.requests() if not url.startswith(("file:", "data:"))] == []


def names(browser: Browser) -> list[str]:
    return browser.texts("#layer-table tbody .name")


def values(browser: Browser, column: int) -> list[float]:
    script = (
        "return [...document.querySelectorAll('#layer-table tbody tr')]"
        ".map(row => Number(row.cells[arguments[0]].dataset.value))"
    )
    return list(browser.run(script, column))


def test_any_column_sorts_both_ways(browser: Browser, files: Path) -> None:
    browser.open(files / "plain.html")
    assert names(browser) == LAYERS
    browser.click(COLUMN.format(1))
    assert names(browser) == LAYERS  # numbers in names count as numbers
    browser.click(COLUMN.format(1))
    assert names(browser) == LAYERS[::-1]
    columns = browser.run("return document.querySelectorAll('#layer-table thead button').length")
    assert columns == 11
    for column in range(1, columns):
        header = COLUMN.format(column + 1)
        browser.click(header)
        assert values(browser, column) == sorted(values(browser, column))
        browser.click(header)
        assert values(browser, column) == sorted(values(browser, column), reverse=True)
        states = browser.run(
            "return [...document.querySelectorAll('#layer-table th')]"
            ".map(th => th.getAttribute('aria-sort')).filter(Boolean)"
        )
        assert states == ["descending"]


def test_rows_are_filtered_by_name_and_a_link_brings_them_back(
    browser: Browser, files: Path
) -> None:
    browser.open(files / "plain.html")
    field = browser.find("#layers input.filter")
    field.send_keys("ENCODER.1")
    assert names(browser) == ["encoder.1", "encoder.10"]
    assert browser.texts("#layers .count") == ["2 of 4"]
    browser.run("document.querySelector('#verdict a[href=\"#layer-0\"]').click()")
    browser.run("return new Promise(done => setTimeout(done, 50))")
    assert names(browser) == LAYERS


def test_light_and_dark(browser: Browser, files: Path) -> None:
    paper = "return getComputedStyle(document.body).backgroundColor"
    browser.open(files / "plain.html")
    light = browser.run(paper)
    assert light == "rgb(255, 255, 255)"
    browser.open(files / "plain.html", dark=True)
    dark = browser.run(paper)
    assert dark != light
    switch = browser.find("button.theme")
    assert switch.text == "Light"
    switch.click()
    assert browser.run(paper) == light
    switch.click()
    assert browser.run(paper) == dark


@pytest.mark.parametrize(
    ("name", "dark"), [("plain", False), ("plain", True), ("trainings", False)]
)
def test_text_stands_out_from_its_ground(
    browser: Browser, files: Path, name: str, dark: bool
) -> None:
    """Texts have a contrast of at least 4.5, the bound of WCAG 2.2 (level AA)."""
    browser.open(files / f"{name}.html", dark=dark)
    assert browser.run(CONTRAST) == []


CONTRAST = """
const light = (css) => {
  const [r, g, b] = css.match(/[\\d.]+/g).map(Number).map((v) => v / 255)
    .map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const ground = (element) => {
  if (!element) return "rgb(255, 255, 255)";
  const parts = getComputedStyle(element).backgroundColor.match(/[\\d.]+/g).map(Number);
  const share = parts[3] ?? 1;
  if (share === 1) return `rgb(${parts.join()})`;
  const below = ground(element.parentElement).match(/[\\d.]+/g).map(Number);
  return `rgb(${below.map((v, i) => share * parts[i] + (1 - share) * v).join()})`;
};
const faint = new Set();
for (const element of document.querySelectorAll("body *")) {
  const own = [...element.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
  if (!own || !element.getClientRects().length || element.closest("svg, script")) continue;
  const [a, b] = [getComputedStyle(element).color, ground(element)].map(light);
  const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (contrast < 4.5) faint.add(`${element.tagName} ${element.className} ${contrast.toFixed(2)}`);
}
return [...faint];
"""


def test_the_heat_map_shows_any_measure_by_mouse_and_keyboard(
    browser: Browser, files: Path
) -> None:
    from selenium.webdriver.common.keys import Keys

    browser.open(files / "plain.html")
    pixels = (
        "const c = document.getElementById('heat-canvas');return [c.width, c.height, c.toDataURL()]"
    )
    browser.click("#heat-title")
    before = browser.run(pixels)
    assert before[:2] == [6, 4]
    grid, said = browser.find("#heat-grid"), browser.find("#heat-value")
    choice = browser.find("#heat-measure")
    choice.send_keys("Cosine of the step")
    grid.send_keys(Keys.END, Keys.ARROW_DOWN)
    assert "cosine of the step of encoder.1 at step 50" in said.text
    shown = browser.find("#layer-1 td:nth-of-type(3)").text
    assert said.text.split()[0] == shown.strip("*\u2007 ")
    choice.send_keys("Effective")
    assert "effective learning rate of encoder.1 at step 50" in said.text
    assert browser.run(pixels) != before
    browser.find("#heat-filter").send_keys("head")
    assert browser.run(pixels)[:2] == [6, 1]
    assert "effective learning rate of head at step 50" in said.text
    grid.send_keys(Keys.ENTER)
    assert browser.run("return location.hash") == "#layer-3"


@pytest.mark.parametrize("name", ["plain", "hostile", "compare", "trainings"])
def test_nothing_sticks_out_of_a_narrow_screen(browser: Browser, files: Path, name: str) -> None:
    browser.open(files / f"{name}.html", width=400)
    assert browser.run("return document.documentElement.scrollWidth") <= 400
