"""The page: right numbers in right words, whatever models are called; one file, no network."""

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from adiv_monitor.audit.report import AuditReport
from adiv_monitor.pages.findings import checks
from adiv_monitor.pages.heat import heat_map
from adiv_monitor.pictures.colours import painted
from adiv_monitor.pictures.grid import grid
from adiv_monitor.printable import printable
from adiv_monitor.report import AlignmentReading, LayerReading, StepReport
from adiv_monitor.report.wording import number

pytest.importorskip("jinja2", reason="makes the page")
pytest.importorskip("matplotlib", reason="draws its pictures")

import example_audits
from example_audits import known_by_reports
from example_reports import running

from adiv_monitor.pages import compare, page


class Elements(HTMLParser):
    """Every element of a page with its attributes, and which of them are not closed in order."""

    VOID = frozenset({"meta", "link", "input", "wbr", "img"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)


def small(layers: tuple[str, ...] = ("stem", "head"), steps: int = 3) -> AuditReport:
    return example_audits.made_up(list(layers), steps)


def reading(**measures: float) -> LayerReading:
    return LayerReading("linear", 64, 64, 0, 1.0, **measures)


def heat_data(text: str) -> dict:
    found = re.search(r'<script type="application/json" id="heat-data">(.*?)</script>', text, re.S)
    assert found is not None
    return json.loads(found[1])


def test_the_heat_map_says_what_tables_say() -> None:
    errors = {"update_cosine": 0.012}
    broken = replace(reading(update_cosine=math.nan), non_finite=("outputs",))
    heat = heat_map(
        running(
            StepReport(
                0, {"a": replace(reading(update_cosine=0.0431), standard_error=errors)}, {}, 1.0
            ),
            StepReport(5, {"a": reading(update_cosine=math.nan), "b": broken}, {}, 1.0),
        ).record(),
        ["update_cosine"],
    )
    assert heat is not None
    (measure,) = heat["measures"]
    assert measure["texts"] == [number(0.0431, 0.012), "–", "", "NaN"] == ["0.04", "–", "", "NaN"]
    assert measure["levels"] == [3, -1, -1, -2], "of 0 to 63; none; none; not finite"
    assert measure["cells"] == "AAABAAIAAwA="  # 0, 1, 2, 3


def test_pages_and_pictures_have_the_same_cells() -> None:
    layers = {"a": reading(update_ratio=0.1), "b": reading(update_ratio=math.nan)}
    layers["c"] = replace(reading(update_ratio=20.0), non_finite=("outputs",))
    layers["gain"] = replace(reading(update_ratio=0.3), kind="gain")
    record = running(StepReport(0, layers, {}, 1.0)).record()
    heat, drawn = heat_map(record, ["update_ratio"]), grid(record, "update_ratio")
    assert heat is not None and drawn is not None
    (measure,) = heat["measures"]
    palette = heat["palettes"][measure["palette"]]
    shown = dict(zip(layers, measure["levels"], strict=True))
    assert drawn.layers == ("a", "b", "c"), "a gain's is not comparable"
    assert (shown["b"], shown["c"], shown["gain"]) == (-1, -2, -1)
    assert drawn.not_finite.tolist() == [[False], [False], [True]]
    rgb = painted("update_ratio", drawn.places)[0, 0]
    assert palette[shown["a"]] == "#{:02x}{:02x}{:02x}".format(*rgb)
    assert measure["texts"] == ["0.100", "–", "20.000", "0.300"]
    assert [mark.kind for mark in heat["legend"]] == measure["marks"]


def test_it_is_one_file_of_well_formed_elements_that_loads_nothing() -> None:
    for text in (page(small()), compare(small(), small(("stem",)), ("one", "two"))):
        elements = Elements(text)
        assert elements.wrong == []
        assert elements.open == []
        for tag, attributes in elements.found:
            for name in ("src", "href", "action", "xlink:href"):
                link = attributes.get(name) or ""
                assert link.startswith(("#", "data:")) or not link, (tag, link)
        assert "default-src 'none'" in text
        ids = [attributes["id"] for _, attributes in elements.found if "id" in attributes]
        assert len(ids) == len(set(ids))
        links = {a["href"] for tag, a in elements.found if tag == "a"}
        assert {f"#{i}" for i in ids if i} >= links


def test_hostile_names_stay_names() -> None:
    report = example_audits.made_up(list(example_audits.HOSTILE), 3)
    plain = page(small())
    text = page(report)
    kinds = {tag for tag, _ in Elements(text).found}
    assert kinds == {tag for tag, _ in Elements(plain).found} | {"details", "summary"}
    assert not any(name.startswith("on") for _, a in Elements(text).found for name in a)
    assert heat_data(text)["layers"] == [printable(name) for name in example_audits.HOSTILE]
    assert "\u202e" not in text
    Elements(compare(report, report, ("<b>a</b>", "</title><script>alert(1)</script>")))
    both = compare(report, report, ("<b>a</b>", "</title><script>alert(1)</script>"))
    assert "<b>a</b>" not in both
    assert both.count("<script>") == 1
    assert page(small(("\ud800",))).encode()


def test_no_digit_beyond_the_error_and_no_star_where_errors_do_not_tell() -> None:
    def of(*values: float) -> str:
        layers = {
            f"layer{i}": replace(
                reading(update_cosine=value), standard_error={"update_cosine": 0.021}
            )
            for i, value in enumerate(values)
        }
        record = replace(small().record, reports=(StepReport(0, layers, {}, 1.0),))
        return page(AuditReport((), record))

    told = of(0.1234, 0.9876)
    assert ">0.12<b" in told
    assert "0.123" not in re.sub(r'data-value="[^"]*"', "", told)
    assert '<b title="worst">*' in told
    assert '<b title="worst">*' not in of(0.1234, 0.1345)


def test_a_healthy_run_says_so_and_what_was_not_looked_at() -> None:
    record = replace(small().record, rates={}, overfit=None)
    text = page(AuditReport((), record))
    assert "Nothing to fix" in text
    assert "other learning rates (not tried)" in text
    assert "decoder.rnn" in text  # not measured
    assert all(not check.strength for check in checks((), record))
    found = checks(small().findings, record)
    assert {check.title: check.strength for check in found if check.strength} == {
        "Inputs and values": "act",
        "Initialisation and depth": "note",
        "Activation functions": "watch",
    }


@pytest.mark.slow(one_in=3)
@pytest.mark.parametrize("losses", [(), (2.3,), (2.3, math.nan), (math.inf,), (0.0, 0.0)])
def test_short_and_broken_runs_have_a_page(losses: tuple[float, ...]) -> None:
    record = replace(small().record, losses=losses, gradient_norms=losses, reports=(), units={})
    text = page(AuditReport((), record))
    assert Elements(text).wrong == []
    assert compare(AuditReport((), record), small(), ("a", "b"))


def test_a_comparison_marks_what_lies_beyond_the_errors() -> None:
    def of(value: float) -> AuditReport:
        layers = {
            "same": replace(
                reading(update_cosine=0.5 + value / 100), standard_error={"update_cosine": 0.01}
            ),
            "changed": reading(update_cosine=value, effective_lr=1 + value),
        }
        return AuditReport((), replace(small().record, reports=(StepReport(0, layers, {}, 1.0),)))

    text = compare(of(0.1), of(0.6), ("a", "b"))
    rows = dict(re.findall(r'<tr id="layer-\d+">.*?data-value="(\w+)"(.*?)</tr>', text, re.S))
    assert "better" not in rows["same"] and "strong" not in rows["same"]
    assert 'class="n better strong"' in rows["changed"]
    assert 'class="n strong"' not in rows["same"]
    assert 'class="n  strong"' in rows["changed"]  # the rate has no bad end
    assert "better" not in compare(of(0.6), of(0.1), ("a", "b")).split("<tbody>")[-1]


def test_alignments_have_a_table_where_they_were_asked_for() -> None:
    assert "<h3>Alignments" not in page(small())
    report = small()
    aligned = AlignmentReading("hidden", "linear", 64, 32, ("stem",), 64, alpha=0.625)
    last = replace(report.record.reports[-1], alignment={"<b>head</b>": aligned})
    reports = (*report.record.reports[:-1], last)
    text = page(replace(report, record=replace(report.record, reports=reports)))
    assert "<h3>Alignments" in text and "hidden, linear, 64 → 32" in text and "0.625" in text
    assert "<b>head" not in text


# Trainings that are known by their reports


def test_trainings_are_compared_by_what_is_known_of_them() -> None:
    known, unknown = (known_by_reports(seed, losses=not seed) for seed in (0, 1))
    text = compare(known, unknown, ("a", "b"))
    assert "Loss 2 → 1, steps 0 to 500" in text and "Loss not known" in text
    assert "2 at step 0, 1 at step 500" in text, "at its own steps"
    told = re.sub(r"<[^>]*>", " ", text[text.index('id="settings"') : text.index('id="layers"')])
    assert "0.1" in told and "0.05" in told
    for unknown in ("Parameters", "Batches", "Seed", "Gradients", "Model", " 0 ", "nan"):
        assert unknown not in told
    assert "not tried" not in text and "trial" not in text.partition("</style>")[2].lower()
    assert "reports can&#39;t tell; to find out, run <code>adiv-audit</code>" in text
    assert text.count("<img ") == 6, "one colour scale for both, three measures"
