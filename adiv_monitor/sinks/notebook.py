"""A report as an HTML table for notebooks: the cells of `TableSink`, in the notebook's colours."""

from html import escape

from adiv_monitor.printable import printable
from adiv_monitor.report import StepReport
from adiv_monitor.report.wording import NOT_FINITE
from adiv_monitor.sinks.cells import MARKS, MOST_LINES, MOST_ROWS, TABLE_MEASURES, Table, shown

# The notebook may be light or dark: text keeps its colour, and backgrounds are translucent.
_WORST = "background:rgba(220,38,38,.22);font-weight:700"
_BROKEN = "background:rgba(217,70,239,.3);font-weight:700"
_FRAME = "overflow-x:auto;font-variant-numeric:tabular-nums"
_TABLE = "color:inherit;border-collapse:collapse;margin:.4em 0;font-size:90%"
_NUMBER = "text-align:right;padding:.15em .6em;white-space:nowrap"
_NAME = "text-align:left;padding:.15em .6em;font-weight:400"
_HEAD = "border-bottom:1px solid rgba(128,128,128,.6);vertical-align:bottom"


def report_html(report: StepReport) -> str:
    """Return the report's tables as self-contained HTML that styles nothing around it.

    Each table has at most `MOST_ROWS` rows, as `print` shows them.
    """
    found = shown(report, TABLE_MEASURES, MOST_ROWS, MOST_LINES)
    parts = [f"<div><strong>{_text(found.head)}</strong></div>", *map(_table, found.tables)]
    lines = [*found.legend, found.realised, *found.not_measured, *found.said]
    parts += [f'<div style="font-size:90%">{_text(line)}</div>' for line in lines if line]
    return f'<div style="{_FRAME}">{"".join(parts)}</div>'


def _table(table: Table) -> str:
    heads = [_cell(table.titles[0], f"{_NAME};{_HEAD}", "th")]
    heads += [
        _cell(_broken(title), f"{_NUMBER};{_HEAD}", "th")
        for title in (table.titles[1], *table.measures)
    ]
    body = ""
    for row in table.rows:
        name = _text(row.path) if row.path else "<i>the model itself</i>"
        cells = [_cell(name, _NAME, "th"), _cell(row.seen, _NUMBER), *map(_value, row.cells)]
        body += f"<tr>{''.join(cells)}</tr>"
    head = f"<thead><tr>{''.join(heads)}</tr></thead>"
    more = f'<div style="font-size:90%">{_text(table.more)}</div>' if table.more else ""
    return f'<table style="{_TABLE}">{head}<tbody>{body}</tbody></table>{more}'


def _value(text: str) -> str:
    look = _WORST if text.endswith("*") else _BROKEN if text == NOT_FINITE else ""
    said = MARKS["*"] if text.endswith("*") else MARKS.get(text, "")
    return _cell(_text(text), f"{_NUMBER};{look}" if look else _NUMBER, title=said)


def _cell(html: str, style: str, tag: str = "td", title: str = "") -> str:
    said = f' title="{_text(title)}"' if title else ""
    return f'<{tag} style="{style}"{said}>{html}</{tag}>'


def _broken(title: str) -> str:
    """Format a measure's name so that the line may break before its last word."""
    return "_<wbr>".join(_text(title).rsplit("_", 1))


def _text(words: str) -> str:
    return escape(printable(words))
