"""What a picture shows, as numbers."""

import io

import numpy as np
from PIL import Image

from adiv_monitor.pictures.picture import Picture


def share(picture: Picture | bytes, colour: tuple[int, int, int]) -> float:
    """Return the share of a picture, or of a PNG file, that has this colour but for rounding."""
    png = picture if isinstance(picture, bytes) else picture.png()
    pixels = np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int)
    return float((np.abs(pixels - colour).max(axis=-1) <= 2).mean())
