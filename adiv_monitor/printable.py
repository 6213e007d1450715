"""Text that is shown: what would steer a terminal or a page, or be Markdown, is spelled out."""

import html
import re
from unicodedata import category

# Control characters, those that turn the direction of writing or are not seen, lone surrogates,
# and the separators of lines and paragraphs.
_STEERING = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
_CODE = re.compile(r"((?<!`)`[^`]+`(?!`))")
_MARKS = re.compile(r"([\\`*_\[\]!|~])")
_BEGINS_A_BLOCK = re.compile(r"^(\d*)([#+=.)-])")


def printable(text: str) -> str:
    r"""The text in one line, with what steers a terminal or a page as escapes: \x1b, \n, \u202e."""
    if text.isprintable():
        return text
    return "".join(
        c.encode("unicode-escape").decode() if category(c) in _STEERING else c for c in text
    )


def quoted(path: str) -> str:
    """A module's path as a name: 'net.5'; the root's, which is empty, in words."""
    return f"'{printable(path)}'" if path else "the model itself"


def layer_words(path: str, kind: str = "") -> str:
    """A layer in a sentence, by type and path; without a path it is the whole model.

    >>> layer_words("net.5", "ReLU"), layer_words("net.5"), layer_words("")
    ("ReLU 'net.5'", "layer 'net.5'", 'the model itself')
    """
    return f"{kind or 'layer'} {quoted(path)}" if path else quoted(path)


def code(name: str) -> str:
    """A name as code in Markdown, in a table too: nothing in it ends that."""
    return "`" + printable(name).replace("`", r"\x60").replace("|", r"\x7c") + "`"


def markdown(text: str) -> str:
    """Text in which Markdown finds nothing to do; what stands between two backquotes is code."""
    parts = _CODE.split(printable(text))
    parts[::2] = [_MARKS.sub(r"\\\1", html.escape(part, quote=False)) for part in parts[::2]]
    return _BEGINS_A_BLOCK.sub(r"\1\\\2", "".join(parts))
