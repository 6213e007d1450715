"""A picture as a Matplotlib figure."""

import io

from matplotlib.figure import Figure
from matplotlib.image import imread

_DPI = 100


class PictureFigure(Figure):
    """A figure that holds one picture, pixel for pixel at its own resolution.

    It is not registered with pyplot: a notebook shows it as a cell's value, and `savefig` writes
    it.
    """

    def __init__(self, png: bytes) -> None:
        pixels = imread(io.BytesIO(png), format="png")
        height, width = pixels.shape[:2]
        super().__init__(figsize=(width / _DPI, height / _DPI), dpi=_DPI, facecolor="white")
        axes = self.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        axes.imshow(pixels, aspect="auto", interpolation="antialiased")

    def _repr_png_(self) -> bytes:
        """Return the PNG that a notebook shows, with or without pyplot."""
        target = io.BytesIO()
        self.savefig(target, format="png", dpi=_DPI)
        return target.getvalue()
