"""A picture of texts and pixels, drawn by Pillow, in which each text knows how wide it is."""

import io
from bisect import bisect_left
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont

INK, MUTED, BAD = "#1f2328", "#6b7280", "#b30000"
LINE = 1.3  # height of a line over the size of its letters


class Font(NamedTuple):
    """Size in pixels, and how the letters look."""

    size: int
    bold: bool = False
    colour: str = INK

    def width(self, words: str) -> float:
        """Pixels that the words take."""
        return _loaded(self.size, self.bold).getlength(words)

    @property
    def line(self) -> int:
        """Pixels from one line to the next."""
        return round(LINE * self.size)

    def wrapped(self, words: str, width: float) -> list[str]:
        """Lines of at most this width; a word that is wider is broken."""
        lines = [""]
        for word in words.split():
            longer = f"{lines[-1]} {word}".strip()
            if self.width(longer) <= width:
                lines[-1] = longer
                continue
            if lines[-1]:
                lines.append("")
            for letter in word:
                if lines[-1] and self.width(lines[-1] + letter) > width:
                    lines.append("")
                lines[-1] += letter
        return lines

    def shortened(self, path: str, width: float) -> str:
        """The path, its longest pieces without so many letters that it is no wider than this.

        Short pieces, such as a block's number, stay, unless nothing else is left to shorten.
        """
        pieces = path.split(".")
        for several in (pieces, [path]):
            # Of the most letters that a piece may have, from the longest down.
            most = range(max(map(len, several)), 2, -1)
            at = bisect_left(most, True, key=lambda n: self.width(_cut(several, n)) <= width)
            if at < len(most):
                return _cut(several, most[at])
        return _cut([path], 3)


class Box(NamedTuple):
    """Pixels, from the picture's upper left corner."""

    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: "Box", apart: float = 0.0) -> bool:
        """Whether they share a pixel, or lie closer to each other than `apart`."""
        return (
            self.left < other.right + apart
            and other.left < self.right + apart
            and self.top < other.bottom + apart
            and other.top < self.bottom + apart
        )


class Picture:
    """What lies where; it becomes as high as what lies lowest.

    Attributes:
        width: in pixels.
        texts: where the ink of each text lies, and its words.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self.height = 0.0
        self.texts: list[tuple[Box, str]] = []
        self._words: list[tuple[tuple[int, int], str, Font]] = []
        self._pixels: list[tuple[tuple[int, int], NDArray[np.uint8]]] = []

    def text(self, left: float, top: float, words: str, font: Font) -> None:
        """One line of words."""
        if not words:
            return
        at = round(left), round(top)
        ink = _loaded(font.size, font.bold).getbbox(words)
        box = Box(at[0] + ink[0], at[1] + ink[1], at[0] + ink[2], at[1] + ink[3])
        self.texts.append((box, words))
        self._words.append((at, words, font))
        self.height = max(self.height, at[1] + font.line)

    def lines(self, left: float, top: float, lines: list[str], font: Font) -> float:
        """Several, one below the other; where the next one would begin."""
        for i, words in enumerate(lines):
            self.text(left, top + i * font.line, words, font)
        return top + len(lines) * font.line

    def pixels(self, left: float, top: float, colours: NDArray[np.uint8]) -> None:
        """Rows × columns × red, green and blue."""
        self._pixels.append(((round(left), round(top)), colours))
        self.height = max(self.height, round(top) + len(colours))

    def png(self, margin: int = 10) -> bytes:
        """The picture as a file, with so many pixels below what lies lowest."""
        from PIL import Image, ImageDraw

        image = Image.new("RGB", (self.width, round(self.height) + margin), "white")
        for corner, colours in self._pixels:
            image.paste(Image.fromarray(colours), corner)
        draw = ImageDraw.Draw(image)
        for corner, words, font in self._words:
            draw.text(corner, words, fill=font.colour, font=_loaded(font.size, font.bold))
        target = io.BytesIO()
        image.save(target, format="PNG", compress_level=3)
        return target.getvalue()


def _cut(pieces: list[str], letters: int) -> str:
    """Longer pieces with so many letters, a third of them from the beginning."""
    cut = (
        p
        if len(p) <= letters
        else f"{p[: letters // 3]}…{p[len(p) - letters + letters // 3 + 1 :]}"
        for p in pieces
    )
    return ".".join(cut)


@cache
def _loaded(size: int, bold: bool) -> "FreeTypeFont":
    from PIL import ImageFont

    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    return ImageFont.truetype(_fonts() / name, size, layout_engine=ImageFont.Layout.BASIC)


@cache
def _fonts() -> Path:
    """The folder of matplotlib's fonts, which have all signs of formulas.

    It is asked for it only where it does not lie in the package: importing it takes longer than
    drawing does.
    """
    spec = find_spec("matplotlib")
    for package in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (folder := Path(package, "mpl-data", "fonts", "ttf")).is_dir():
            return folder
    import matplotlib

    return Path(matplotlib.get_data_path(), "fonts", "ttf")
