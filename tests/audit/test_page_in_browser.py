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
    runs = [example_audits.known_by_reports(seed) for seed in (0, 1)]
    texts = {
        "plain": page(plain),
        "hostile": page(hostile),
        "compare": compare(plain, hostile, ("<i>a</i>", "b")),
        "trainings": compare(*runs, ("a", "b")),
    }
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


def test_columns_sort_both_ways_and_rows_are_filtered(browser: Browser, files: Path) -> None:
    browser.open(files / "plain.html")
    for expected in (LAYERS, LAYERS[::-1]):
        browser.click(COLUMN.format(1))
        assert names(browser) == expected  # numbers in names count as numbers
    for column in range(1, 11):
        cells = "[...document.querySelectorAll('#layer-table tbody tr')].map(row => row.cells[{}])"
        script = f"return {cells.format(column)}.map(cell => Number(cell.dataset.value))"
        for descending in (False, True):
            browser.click(COLUMN.format(column + 1))
            values = browser.run(script)
            assert values == sorted(values, reverse=descending)
    browser.find("#layers input.filter").send_keys("ENCODER.1")
    assert sorted(names(browser)) == ["encoder.1", "encoder.10"]
    assert browser.texts("#layers .count") == ["2 of 4"]
    browser.run("document.querySelector('#verdict a[href=\"#layer-0\"]').click()")
    browser.run("return new Promise(done => setTimeout(done, 50))")
    assert sorted(names(browser)) == LAYERS  # a link brings them back


def test_light_and_dark(browser: Browser, files: Path) -> None:
    ground = "return getComputedStyle(document.body).backgroundColor"
    seen = []
    for dark in (False, True):
        browser.open(files / "plain.html", dark=dark)
        seen.append(browser.run(ground))
    browser.click("button.theme")
    assert seen[0] == "rgb(255, 255, 255)" == browser.run(ground) != seen[1]


def test_the_heat_map_shows_any_measure_by_mouse_and_keys(browser: Browser, files: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    browser.open(files / "plain.html")
    pixels = (
        "const c = document.getElementById('heat-canvas');return [c.width, c.height, c.toDataURL()]"
    )
    browser.click("#heat-title")
    before = browser.run(pixels)
    assert before[:2] == [6, 4]
    grid, said = browser.find("#heat-grid"), browser.find("#heat-value")
    grid.send_keys(Keys.END, Keys.ARROW_DOWN)
    browser.find("#heat-measure").send_keys("Cosine of the step")
    assert "cosine of the step of encoder.1 at step 50" in said.text
    shown = browser.find("#layer-1 td:nth-of-type(3)").text
    assert said.text.split()[0] == shown.strip("*\u2007 ")
    assert browser.run(pixels) != before
    browser.find("#heat-filter").send_keys("head")
    assert browser.run(pixels)[:2] == [6, 1]
    grid.send_keys(Keys.ENTER)
    assert browser.run("return location.hash") == "#layer-3"


@pytest.mark.parametrize("name", ["plain", "hostile", "compare", "trainings"])
def test_nothing_sticks_out_of_a_narrow_screen(browser: Browser, files: Path, name: str) -> None:
    browser.open(files / f"{name}.html", width=400)
    assert browser.run("return document.documentElement.scrollWidth") <= 400
