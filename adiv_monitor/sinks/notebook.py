"""A report as an HTML table, for notebooks: the cells of `TableSink`, in the notebook's colours."""

from html import escape

from adiv_monitor.printable import printable
from adiv_monitor.report import ATTENTION_MEASURES, StepReport, taken
from adiv_monitor.report.wording import NOT_FINITE, not_measured
from adiv_monitor.sinks.cells import (
    MARKS,
    MOST_LINES,
    MOST_ROWS,
    TABLE_MEASURES,
    cell,
    head,
    legend,
    more_words,
    picked,
    realised_words,
    rows_words,
    some,
    worst_paths,
)
from adiv_monitor.sinks.table import KINDS

# Nobody knows whether a notebook is light or dark: letters keep its colour, grounds shine through.
_WORST = "background:rgba(220,38,38,.22);font-weight:700"
_BROKEN = "background:rgba(217,70,239,.3);font-weight:700"
_FRAME = "overflow-x:auto;font-variant-numeric:tabular-nums"
_TABLE = "color:inherit;border-collapse:collapse;margin:.4em 0;font-size:90%"
_NUMBER = "text-align:right;padding:.15em .6em;white-space:nowrap"
_NAME = "text-align:left;padding:.15em .6em;font-weight:400"
_HEAD = "border-bottom:1px solid rgba(128,128,128,.6);vertical-align:bottom"


def report_html(report: StepReport) -> str:
    """The report's tables as HTML that asks for nothing and styles nothing around it.

    `MOST_ROWS` rows at most, as `print` shows them.
    """
    shown = taken(report, TABLE_MEASURES)
    parts = [f"<div><strong>{_text(head(report))}</strong></div>"]
    for kind in KINDS:
        if of_kind := tuple(measure for measure in shown if measure in kind):
            parts.append(_table(report, of_kind))
    said = [*legend(report, shown), realised_words(report)]
    said += [f"not measured: {line}" for line in not_measured(report)]
    said += [*some(report.alarms, "alarm", MOST_LINES), *some(report.notes, "note", MOST_LINES)]
    parts += [f'<div style="font-size:90%">{_text(line)}</div>' for line in said if line]
    return f'<div style="{_FRAME}">{"".join(parts)}</div>'


def _table(report: StepReport, measures: tuple[str, ...]) -> str:
    readings, worst = report.readings(measures[0]), worst_paths(report)
    attends = measures[0] in ATTENTION_MEASURES
    titles = ("attention", "samples") if attends else ("layer", "rows")
    heads = [_cell(titles[0], f"{_NAME};{_HEAD}", "th")]
    heads += [_cell(_broken(t), f"{_NUMBER};{_HEAD}", "th") for t in (titles[1], *measures)]
    rows = ["".join(heads)]
    for path in picked(report, measures, MOST_ROWS):
        reading = readings[path]
        name = _text(path) if path else "<i>the model itself</i>"
        cells = [_cell(name, _NAME, "th"), _cell(rows_words(reading), _NUMBER)]
        cells += [
            _value(cell(reading, measure, path == worst.get(measure))) for measure in measures
        ]
        rows.append("".join(cells))
    body = "".join(f"<tr>{row}</tr>" for row in rows[1:])
    table = (
        f'<table style="{_TABLE}"><thead><tr>{rows[0]}</tr></thead><tbody>{body}</tbody></table>'
    )
    more = more_words(report, measures, MOST_ROWS)
    return table + (f'<div style="font-size:90%">{_text(more)}</div>' if more else "")


def _value(text: str) -> str:
    look = _WORST if text.endswith("*") else _BROKEN if text == NOT_FINITE else ""
    said = MARKS["*"] if text.endswith("*") else MARKS.get(text, "")
    return _cell(_text(text), f"{_NUMBER};{look}" if look else _NUMBER, title=said)


def _cell(html: str, style: str, tag: str = "td", title: str = "") -> str:
    said = f' title="{_text(title)}"' if title else ""
    return f'<{tag} style="{style}"{said}>{html}</{tag}>'


def _broken(title: str) -> str:
    """A measure's name, which may break before its last word."""
    return "_<wbr>".join(_text(title).rsplit("_", 1))


def _text(words: str) -> str:
    return escape(printable(words))
