"""Names with terminal escapes, writing-direction marks or Markdown are only ever displayed."""

import io
import json
import re
import warnings
from dataclasses import replace
from pathlib import Path
from unicodedata import category

import pytest
from example_audits import made_up
from example_reports import attention, reading, report, running

from adiv_monitor.audit.command import output
from adiv_monitor.audit.command.cli import main
from adiv_monitor.audit.report import AuditReport
from adiv_monitor.diagnosis.finding import Advice, Finding
from adiv_monitor.pages.layers import worst_lines
from adiv_monitor.printable import printable
from adiv_monitor.report import Alarm, StepReport
from adiv_monitor.sinks import HtmlSink, TableSink
from adiv_monitor.sinks.board import findings_text
from adiv_monitor.sinks.tensorboard import _bullets, _not_measured
from adiv_monitor.step.failures import Failures

for package in ("rich", "jinja2", "matplotlib", "markdown_it", "tensorboard"):
    pytest.importorskip(package)
pytestmark = [
    pytest.mark.filterwarnings("default:Glyph"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # from TensorBoard's imports
]

STEERING = (
    "\x1b[31mred \x1b]0;title\x07 \x9b2J a\rb a\nb \x00 \x7f a\u2028b \u202egnp \u2066x\u2069 "
    "\u061cx a\u200bb \ufeff \ud800 a\U000e0041"
)
PICTURE = "![x](http://elsewhere.org/x.png)"
MARKDOWN = (
    *(PICTURE, f"`{PICTURE}`", f"`{PICTURE}", f"```{PICTURE}`", f"``a`{PICTURE}`b", f"a|{PICTURE}"),
    *(f"\\`{PICTURE}`", f"a`{PICTURE}`", f"\n\n{PICTURE}", f"`\n\n{PICTURE}\n\n`"),
    *("[x](http://a.b)", "<img src=http://a.b>", "<http://a.b>", "![x][y]\n\n[y]: http://a.b"),
    *("**bold**", "__bold__", "~~gone~~", "# head\n# head", "|\n|---|\n|x|", "&lt;b&gt;"),
    *("\\", "a\\", "a`b`c`" + PICTURE, "*"),
)


def steers(text: str) -> list[str]:
    """Return the characters of a text that control the terminal."""
    return [c for c in text if c != "\n" and category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")]


def of(name: str) -> StepReport:
    """Return a report with this name in every place."""
    return report(
        layers={name: reading(1, update_cosine=0.1), f"{name}.2": reading(2, update_cosine=0.9)},
        attention={name: attention()},
        unsupported={name: f"{name}: no rule"},
        unmeasured={f"{name}.weight": 3},
        notes=(f"The gradient of {name} is not finite.",),
        alarms=(Alarm(name, name, 1.0, 0.1),),
    )


def found(name: str) -> Finding:
    advice = (Advice(f"Give {name} another one", None),)
    given = ("exploding", "act", f"{name} explodes.", (), advice, f"Not {name}.")
    return Finding(*given, layers=(name,), against=())


def markdowns(name: str) -> list[str]:
    one = of(name)
    return [
        findings_text([found(name)], running(one).record()),
        _not_measured(one),
        _bullets(one.notes),
        "\n".join(worst_lines(one, ["update_cosine"])),
    ]


def printed(name: str) -> str:
    file = io.StringIO()
    TableSink(file=file).write(of(name))
    return file.getvalue()


def test_nothing_that_steers_is_in_a_table() -> None:
    text = printed(STEERING)
    assert not steers(text)
    assert len(text.splitlines()) == len(printed("name").splitlines())


def hostile() -> AuditReport:
    made = made_up([STEERING, "b"], 2)
    record = replace(made.record, notes=(STEERING,))
    return replace(made, findings=(found(STEERING),), record=record)


def test_nothing_that_steers_is_in_what_an_audit_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = io.StringIO()
    output.show(hostile(), file)
    assert not steers(file.getvalue())
    main(["--config", STEERING])
    assert main(["compare", STEERING, STEERING]) == 2
    assert not steers(capsys.readouterr().err)


def test_nothing_that_steers_is_in_a_page(tmp_path: Path) -> None:
    from adiv_monitor.pages import compare, page

    made = hostile()
    sink = HtmlSink(tmp_path / "run.html")
    sink.write(of(STEERING))
    sink.close()
    both = compare(made, made, (STEERING, STEERING))
    texts = [page(made), both, (tmp_path / "run.html").read_text()]
    assert [steers(text) for text in texts] == [[], [], []]
    data = re.search(r'id="heat-data">(.*?)</script>', texts[0], re.DOTALL)
    layers = json.loads(data[1])["layers"]
    assert layers == [printable(STEERING), "b"] and not any(map(steers, layers))


def test_nothing_that_steers_is_in_texts_of_dashboards() -> None:
    for text in markdowns(STEERING):
        assert not steers(text)


def test_nothing_that_steers_is_in_a_warning() -> None:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        failures = Failures("warn")
        failures.switch_off(STEERING, ValueError(STEERING))
    assert not steers(str(warned[0].message))
    assert failures.switched_off == {STEERING: f"measuring it failed: ValueError: {STEERING}"}


def tags(html: str) -> list[str]:
    """Return the HTML tags except `code`, which is harmless: it loads nothing and links nowhere."""
    return [tag for tag in re.findall(r"<(\w+)", html) if tag != "code"]


@pytest.mark.parametrize("name", MARKDOWN, ids=ascii)
def test_a_name_is_no_markdown(name: str) -> None:
    """Names are shown as plain text by TensorBoard's Markdown, and by CommonMark with tables.

    MLflow's page reads the latter.
    """
    from markdown_it import MarkdownIt
    from tensorboard.plugin_util import markdown_to_safe_html

    common = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render
    for text, harmless in zip(markdowns(name), markdowns("name"), strict=True):
        for render in (markdown_to_safe_html, common):
            assert tags(render(text)) == tags(render(harmless)), (text, render(text))
