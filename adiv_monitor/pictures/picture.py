"""Pictures of texts and pixels, drawn by Pillow, with measured text widths."""

import io
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont

INK, MUTED, BAD = "#1f2328", "#6b7280", "#b30000"
LINE = 1.3  # line height over font size
_MARGIN = 10  # pixels below the lowest content


class Font(NamedTuple):
    """A font: its size in pixels, weight and colour."""

    size: int
    bold: bool = False
    colour: str = INK

    def width(self, words: str) -> float:
        """Return the width of the words in pixels."""
        return _loaded(self.size, self.bold).getlength(words)

    @property
    def line(self) -> int:
        """The line height in pixels."""
        return round(LINE * self.size)

    def wrapped(self, words: str, width: float) -> list[str]:
        """Wrap words into lines of at most this width; a wider word is broken, best at a hyphen."""
        lines = [""]
        for word in words.split():
            longer = f"{lines[-1]} {word}".strip()
            if self.width(longer) <= width:
                lines[-1] = longer
                continue
            if lines[-1]:
                lines.append("")
            parts = word.replace("-", "- ").split()
            for part in parts if max(map(self.width, parts)) <= width else word:
                if lines[-1] and self.width(lines[-1] + part) > width:
                    lines.append("")
                lines[-1] += part
        return lines

    def shortened(self, path: str, width: float) -> str:
        """Shorten a path to this width by leaving out of its middle what is too much."""
        cut = path
        for letters in range(len(path) - 1, 2, -1):
            if self.width(cut) <= width:
                break
            cut = f"{path[: letters // 3]}…{path[len(path) - letters + letters // 3 + 1 :]}"
        return cut


# A rectangle in pixels, from the picture's upper left corner: left, top, right, bottom.
Box = tuple[float, float, float, float]


class Picture:
    """A picture with placed texts and pixels; its height follows from the lowest of them.

    Attributes:
        width: in pixels.
        texts: bounding box of each text's ink, and the text.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self.height = 0.0
        self.texts: list[tuple[Box, str]] = []
        self._words: list[tuple[tuple[int, int], str, Font]] = []
        self._pixels: list[tuple[tuple[int, int], NDArray[np.uint8]]] = []

    def text(self, left: float, top: float, words: str, font: Font) -> None:
        """Draw one line of words."""
        if not words:
            return
        at = round(left), round(top)
        ink = _loaded(font.size, font.bold).getbbox(words)
        box = (at[0] + ink[0], at[1] + ink[1], at[0] + ink[2], at[1] + ink[3])
        self.texts.append((box, words))
        self._words.append((at, words, font))
        self.height = max(self.height, at[1] + font.line)

    def lines(self, left: float, top: float, lines: list[str], font: Font) -> float:
        """Draw several lines below each other; return the top of the next line."""
        for i, words in enumerate(lines):
            self.text(left, top + i * font.line, words, font)
        return top + len(lines) * font.line

    def pixels(self, left: float, top: float, colours: NDArray[np.uint8]) -> None:
        """Draw pixels, rows × columns × (red, green, blue)."""
        self._pixels.append(((round(left), round(top)), colours))
        self.height = max(self.height, round(top) + len(colours))

    def png(self) -> bytes:
        """Return the picture as a PNG file, with a margin below the lowest content."""
        from PIL import Image, ImageDraw

        image = Image.new("RGB", (self.width, round(self.height) + _MARGIN), "white")
        for corner, colours in self._pixels:
            image.paste(Image.fromarray(colours), corner)
        draw = ImageDraw.Draw(image)
        for corner, words, font in self._words:
            draw.text(corner, words, fill=font.colour, font=_loaded(font.size, font.bold))
        target = io.BytesIO()
        image.save(target, format="PNG", compress_level=3)
        return target.getvalue()


@cache
def _loaded(size: int, bold: bool) -> "FreeTypeFont":
    from PIL import ImageFont

    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    return ImageFont.truetype(_fonts() / name, size, layout_engine=ImageFont.Layout.BASIC)


@cache
def _fonts() -> Path:
    """Return the folder of Matplotlib's fonts, which have all signs of formulas.

    The package is imported only if the folder is not found in it: importing takes longer than
    drawing.
    """
    spec = find_spec("matplotlib")
    for package in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (folder := Path(package, "mpl-data", "fonts", "ttf")).is_dir():
            return folder
    import matplotlib

    return Path(matplotlib.get_data_path(), "fonts", "ttf")
