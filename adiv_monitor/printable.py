"""Escaping of text for display: control characters, and characters that Markdown interprets."""

import html
import re
from unicodedata import category

# Control characters, characters that are invisible or change the direction of writing, lone
# surrogates, and line and paragraph separators.
_STEERING = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
_CODE = re.compile(r"((?<!`)`[^`]+`(?!`))")
_MARKS = re.compile(r"([\\`*_\[\]!|~])")
_BEGINS_A_BLOCK = re.compile(r"^(\d*)([#+=.)-])")


def printable(text: str) -> str:
    r"""Return the text in one line, with control and invisible characters as escapes (\x1b, \n)."""
    if text.isprintable():
        return text
    return "".join(
        c.encode("unicode-escape").decode() if category(c) in _STEERING else c for c in text
    )


def quoted(path: str) -> str:
    """Return a module's path in quotes, 'net.5'; "the model itself" for the root's empty path."""
    return f"'{printable(path)}'" if path else "the model itself"


def layer_words(path: str, kind: str = "") -> str:
    """Return the words for a layer in a sentence: its type and path.

    An empty path is that of the whole model.

    >>> layer_words("net.5", "ReLU"), layer_words("net.5"), layer_words("")
    ("ReLU 'net.5'", "layer 'net.5'", 'the model itself')
    """
    return f"{kind or 'layer'} {quoted(path)}" if path else quoted(path)


def counted(number: int, what: str) -> str:
    """Return a number with its noun: "1 layer", "1,024 layers"."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def code(name: str) -> str:
    """Return a name as Markdown code, also valid in a table: backquotes and bars are escaped."""
    return "`" + printable(name).replace("`", r"\x60").replace("|", r"\x7c") + "`"


def markdown(text: str) -> str:
    """Escape all Markdown in the text, except that text between two backquotes stays code."""
    parts = _CODE.split(printable(text))
    parts[::2] = [_MARKS.sub(r"\\\1", html.escape(part, quote=False)) for part in parts[::2]]
    return _BEGINS_A_BLOCK.sub(r"\1\\\2", "".join(parts))
