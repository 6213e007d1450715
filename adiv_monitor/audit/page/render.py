"""Templates to text: everything is escaped, nothing is loaded from elsewhere."""

import base64
import hashlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adiv_monitor.sinks.wording import number, percent

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

_HERE = Path(__file__).parent


def render(template: str, **values: Any) -> str:
    """The page that a template makes of values; all of them are escaped.

    The page's own content security policy allows no script but ours, by its hash, and no request.
    """
    from markupsafe import Markup

    style, script = _asset("page.css"), _asset("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assets = {"style": Markup(style), "script": Markup(script), "script_hash": digest}
    return _environment().get_template(template).render(**values, **assets)


@cache
def _environment() -> "Environment":
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError as error:
        raise ImportError(
            'the audit\'s page needs the package jinja2: pip install "adiv-monitor[audit]"'
        ) from error
    environment = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "percent": percent, "path": path}
    return environment


def path(name: str) -> "Markup":
    """A module's path: it may break after its dots, and can't turn the writing around it."""
    from markupsafe import Markup, escape

    if not name:
        return Markup("<i>the model itself</i>")
    pieces = Markup(".<wbr>").join(escape(piece) for piece in name.split("."))
    return Markup("<bdi>{}</bdi>").format(pieces)


@cache
def _asset(name: str) -> str:
    return (_HERE / "assets" / name).read_text(encoding="utf-8")
