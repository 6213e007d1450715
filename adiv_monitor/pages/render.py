"""Rendering of templates: everything is escaped, and pages load nothing from elsewhere."""

import base64
import hashlib
import json
import math
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adiv_monitor.diagnosis.diagnose import finding_title
from adiv_monitor.diagnosis.health import MEASURE_TITLES, fix_title, measure_title
from adiv_monitor.files import needs
from adiv_monitor.pages.findings import STRENGTH_WORDS, significant
from adiv_monitor.pictures.colours import HEALTHY, NOT_FINITE, TOO_LITTLE, TOO_MUCH
from adiv_monitor.printable import printable
from adiv_monitor.report.wording import cell, number, percent, rows_words

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

_HERE = Path(__file__).parent


def render(template: str, **values: Any) -> str:
    """Render a template with values, all of which are escaped and made printable.

    The page's content security policy allows our script only, by its hash, and no requests.
    """
    from markupsafe import Markup

    style, script = _colours() + _asset("page.css"), _asset("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assets = {"style": Markup(style), "script": Markup(script), "script_hash": digest}
    return _environment().get_template(template).render(**values, **assets)


def _colours() -> str:
    """Return the colours of heat maps as CSS variables."""
    named = {"healthy": HEALTHY, "too-little": TOO_LITTLE, "too-much": TOO_MUCH}
    named["not-finite"] = NOT_FINITE[1]
    return f":root {{ {' '.join(f'--{name}: {colour};' for name, colour in named.items())} }}\n"


# Names that all templates may use.
_WORDS: dict[str, Any] = {
    "finding_title": finding_title,
    "measure_title": measure_title,
    "fix_title": fix_title,
    "measure_titles": MEASURE_TITLES,
    "strength_words": STRENGTH_WORDS,
    "significant": significant,
    "isfinite": math.isfinite,
    "cell": cell,
    "rows_words": rows_words,
}


@cache
def _environment() -> "Environment":
    needs("the audit's page", ["jinja2"])
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "percent": percent, "path": path}
    environment.filters |= {"explained": explained, "code": code}
    environment.globals |= _WORDS
    return environment


def path(name: str) -> "Markup":
    """Format a module's path, with possible line breaks after its dots."""
    from markupsafe import Markup, escape

    if not name:
        return Markup("<i>the model itself</i>")
    return Markup(".<wbr>").join(escape(piece) for piece in printable(name).split("."))


def code(text: str) -> "Markup":
    """Format a sentence in which text between backquotes becomes code."""
    from markupsafe import Markup, escape

    parts = printable(text).split("`")
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if i % 2 else escape(part)
        for i, part in enumerate(parts)
    )


def _shown(value: object) -> object:
    """Make a template's values printable; markup stays as it is."""
    from markupsafe import Markup

    return value if isinstance(value, Markup) or not isinstance(value, str) else printable(value)


def explained(finding: str) -> "dict[str, Markup]":
    """Return "means", "hurts" and "problems" of a finding from docs/findings; {} for others."""
    from markupsafe import Markup

    known: dict[str, str] = json.loads(_asset("findings.json")).get(finding, {})
    return {section: Markup(html) for section, html in known.items()}


@cache
def _asset(name: str) -> str:
    return (_HERE / "assets" / name).read_text(encoding="utf-8")
