"""Pictures of layers × steps, in the network's order: one measure, or an overview."""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from adiv_monitor.diagnosis.health import MEASURE_TITLES, measure_title
from adiv_monitor.pictures.colours import (
    HEALTHY,
    NO_VALUE,
    NOT_FINITE,
    TOO_LITTLE,
    TOO_MUCH,
    bar,
    is_judged,
    painted,
    plain,
    stripe,
)
from adiv_monitor.pictures.grid import Grid, legend
from adiv_monitor.pictures.picture import BAD, INK, MUTED, Font, Picture
from adiv_monitor.printable import printable
from adiv_monitor.report.blocks import blocks, common_stem

_WIDTH, _MARGIN, _GAP = 860, 12, 18  # pixels
_MOST_BLOCKS = 40
_HEADLINE, _SMALLEST_HEADLINE = 37, 22  # sizes; longer headlines shrink, then use two lines
_HEIGHT = 500  # pixels of the overview; a card of TensorBoard shrinks a higher one to fit
_MOST_LINES = 3
_STRIP, _BELOW_STRIP = 22, 8  # heights of the losses
_BAR = 12  # height of colour bars
_APART = 6  # minimal pixels between two texts of a row


class _Style(NamedTuple):
    """The font of a picture's small texts, and its room for names."""

    small: Font
    most_names: int  # with more layers, blocks are named instead
    names: float  # largest share of the width for names


_OVERVIEW, _SINGLE = (
    _Style(Font(21, False, MUTED), 15, 0.18),
    _Style(Font(12, False, MUTED), 60, 0.4),
)
_TITLE = Font(22)  # of each measure of the overview


def heat_picture(found: Grid, named: Collection[str] = ()) -> Picture:
    """Draw one measure, with a row per layer, a column per kept step, and a legend.

    Args:
        found: the values.
        named: layers whose names are in red.
    """
    picture = Picture(_WIDTH)
    room = _WIDTH - 2 * _MARGIN
    title, reads = Font(17), Font(13, colour=MUTED)
    words = title.wrapped(f"{measure_title(found.measure)} ({found.measure})", room)
    top = picture.lines(_MARGIN, _MARGIN - 4, words, title) + 2
    words = reads.wrapped(MEASURE_TITLES[found.measure].reads, room)
    top = picture.lines(_MARGIN, top, words, reads) + 6
    # Each named layer has room for a line of twelve pixels.
    layers = len(found.layers)
    rows = 16 * layers if layers <= _SINGLE.most_names else max(3 * layers, 900)
    _panels(picture, top, (found,), named, max(rows, 64), _SINGLE)
    return picture


def overview_picture(
    grids: Sequence[Grid],
    headline: str,
    paragraphs: Iterable[str],
    named: Collection[str],
    losses: Sequence[float | None] = (),
) -> Picture:
    """Draw an overview of one screen: the verdict in words, and the measures side by side.

    Size and type suit the cards of TensorBoard, which are 360 pixels wide and 210 high by default.

    Args:
        grids: the measures, of the same layers and steps.
        headline: the verdict.
        paragraphs: the findings.
        named: layers whose names are in red.
        losses: the loss of each step, over the first one; None: not known. Measures compare a layer
            with itself or with others, so they may look healthy in a run whose loss explodes.
    """
    picture = Picture(_WIDTH)
    room = _WIDTH - 2 * _MARGIN
    widest = Font(_HEADLINE, bold=True).width(headline)
    size = max(_SMALLEST_HEADLINE, min(_HEADLINE, int(_HEADLINE * room / max(widest, 1))))
    head, body = Font(size, bold=True), Font(22)
    top = picture.lines(_MARGIN, _MARGIN - 4, _some(head.wrapped(headline, room), 2), head) + 6
    indent = body.width("• ")
    said: list[tuple[float, str]] = []
    for paragraph in paragraphs:
        first, *others = body.wrapped(paragraph, room - indent)
        below = indent if paragraph.startswith("• ") else 0.0
        said += [(_MARGIN, first), *((_MARGIN + below, line) for line in others)]
    if len(said) > _MOST_LINES:
        said[_MOST_LINES - 1 :] = [(_MARGIN + indent, "… and more")]
    for i, (left, line) in enumerate(said):
        picture.text(left, top + i * body.line, line, body)
    top += len(said) * body.line + 8
    if grids:
        rows = max(_HEIGHT - round(top) - 227, 90)
        _panels(picture, top, grids, named, rows, _OVERVIEW, losses)
    return picture


def _some(lines: list[str], most: int) -> list[str]:
    return lines if len(lines) <= most else [*lines[: most - 1], f"{lines[most - 1][:-1]}…"]


def _panels(
    picture: Picture,
    top: float,
    grids: Sequence[Grid],
    named: Collection[str],
    rows: int,
    style: _Style,
    losses: Sequence[float | None] = (),
) -> None:
    """Draw grids of the same layers side by side, `rows` pixels high, with names and legend."""
    font = style.small._replace(colour=INK)
    groups = _groups(grids[0].layers, style.most_names)
    names = [font.shortened(name, style.names * _WIDTH) for name, _ in groups]
    sizes = [len(block) for _, block in groups]
    has_losses = any(loss is not None for loss in losses)
    beside = [*names, "loss"] if has_losses else names
    left = _MARGIN + max(font._replace(bold=True).width(name) for name in beside) + 8
    each = int((_WIDTH - _MARGIN - left + _GAP) / len(grids)) - _GAP
    if len(grids) > 1:
        titles = [_TITLE.wrapped(measure_title(g.measure), each) for g in grids]
        highest = max(map(len, titles))
        for i, lines in enumerate(titles):
            down = (highest - len(lines)) * _TITLE.line
            picture.lines(left + i * (each + _GAP), top + down, lines, _TITLE)
        top += highest * _TITLE.line + 4
    if has_losses:
        picture.text(_MARGIN, top + (_STRIP - font.line) / 2, "loss", font)
        for i in range(len(grids)):
            picture.pixels(left + i * (each + _GAP), top, _loss_strip(losses, each))
        top += _STRIP + _BELOW_STRIP
    for i, found in enumerate(grids):
        begin = left + i * (each + _GAP)
        picture.pixels(begin, top, _cells(found, rows, each, sizes))
        _steps(picture, begin, top + rows + 3, each, found.steps, style.small)
        _bar(picture, begin, top + rows + style.small.line + 12, each, found.measure, style.small)
    ends, placed = np.cumsum(sizes), list[float]()
    middles = (ends - np.array(sizes) / 2) * rows / ends[-1]
    marked = [any(path in named for path in block) for _, block in groups]
    for i in sorted(range(len(groups)), key=lambda i: not marked[i]):  # red names take precedence
        if all(abs(middles[i] - other) >= font.line - 1 for other in placed):
            placed.append(middles[i])
            own = font._replace(bold=True, colour=BAD) if marked[i] else font
            picture.text(_MARGIN, top + middles[i] - font.line / 2, names[i], own)
    below = top + rows + 2 * style.small.line + _BAR + 32
    _legend(picture, below, grids, style.small)


def _cells(found: Grid, rows: int, columns: int, sizes: Sequence[int]) -> NDArray[np.uint8]:
    """Return the pixels of a grid, with white lines between blocks if blocks are named."""
    levels, not_finite = _pooled(found, most=rows // 2)
    layers, steps = levels.shape
    down, across = np.arange(rows) * layers // rows, np.arange(columns) * steps // columns
    cells = np.ix_(down, across)
    pixels = painted(found.measure, levels)[cells]
    stripe(pixels, np.isnan(levels)[cells], NO_VALUE)
    stripe(pixels, not_finite[cells], NOT_FINITE)
    if len(sizes) < len(found.layers):
        pixels[np.cumsum(sizes)[:-1] * rows // len(found.layers)] = 255
    return pixels


def _loss_strip(losses: Sequence[float | None], columns: int) -> NDArray[np.uint8]:
    """Return pixels of losses over the first one: pale up to 1, red from 10 on."""
    values = np.array([np.nan if loss is None else loss for loss in losses])
    is_broken = np.array([loss is not None and not np.isfinite(loss) for loss in losses])
    across = np.arange(columns) * len(losses) // columns
    cells = np.ix_(np.zeros(_STRIP, dtype=int), across)
    rise = np.log10(np.maximum(np.where(is_broken, np.nan, values), 1.0))
    levels = np.where(rise > 0, 0.75 + np.minimum(rise, 1.0) / 4, rise + 0.5)[None]
    pixels: NDArray[np.uint8] = painted("update_ratio", levels)[cells]
    stripe(pixels, np.isnan(levels)[cells], NO_VALUE)
    stripe(pixels, is_broken[None][cells], NOT_FINITE)
    return pixels


def _pooled(found: Grid, most: int) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Reduce layers that share a pixel row to the one that is furthest from healthy, or darkest.

    Values that are not finite take precedence.
    """
    levels = found.places
    together = -(-len(levels) // most)
    if together == 1:
        return levels, found.not_finite
    far = np.abs(levels - 0.5) if is_judged(found.measure) else -levels
    far = np.where(found.not_finite, np.inf, np.where(np.isnan(levels), -np.inf, far))
    at = [
        begin + far[begin : begin + together].argmax(axis=0)
        for begin in range(0, len(levels), together)
    ]
    chosen = np.stack(at), np.arange(levels.shape[1])
    return levels[chosen], found.not_finite[chosen]


def _groups(layers: tuple[str, ...], most: int) -> list[tuple[str, tuple[str, ...]]]:
    """Return names and layers: single layers, or blocks of neighbours if there are too many.

    Names are without the common prefix of all paths.
    """
    found: dict[str, tuple[str, ...]] = {path: (path,) for path in layers}
    if len(layers) > most:
        found = blocks(layers, most=min(most, _MOST_BLOCKS))
    stem = printable(common_stem(layers))
    names = map(printable, found)
    return list(zip((n.removeprefix(stem) or n for n in names), found.values(), strict=True))


def _steps(
    picture: Picture, left: float, top: float, width: float, steps: tuple[int, ...], font: Font
) -> None:
    """Draw the numbers of at most five steps below a grid, equally far apart, from the first on."""
    each, last = width / len(steps), len(steps) - 1
    for between in (4, 3, 2, 1):
        regular = range(0, len(steps), max(-(-last // between), 1))
        labels = {(i + 0.5) * each: f"{steps[i]:,}" for i in regular}
        if len(_placed(width, labels, font)) == len(labels):
            break
    _row(picture, left, top, width, labels, font)


def _bar(picture: Picture, left: float, top: float, width: int, measure: str, font: Font) -> None:
    """Draw the colour bar, with the healthy limits and the ends."""
    meant = bar(measure)
    span = meant.high - meant.low
    ramp = painted(measure, np.linspace(meant.low, meant.high, width))
    picture.pixels(left, top, np.tile(ramp, (_BAR, 1, 1)))
    at = {(place - meant.low) / span * width: words for place, words in meant.ticks.items()}
    for x in at:
        mark = left + min(x, width - 1)
        picture.pixels(mark, top + _BAR, plain(MUTED, (3, 1)))
    if meant.healthy is not None:
        first, second = (round((place - meant.low) / span * width) for place in meant.healthy)
        picture.pixels(left + first, top + _BAR, plain(INK, (3, second - first)))
    _row(picture, left, top + _BAR + 4, width, at, font)


def _row(
    picture: Picture, left: float, top: float, width: float, labels: dict[float, str], font: Font
) -> None:
    """Draw labels centred at their places, within the width; earlier labels take precedence."""
    for begin, words in _placed(width, labels, font):
        picture.text(left + begin, top, words, font)


def _placed(width: float, labels: dict[float, str], font: Font) -> list[tuple[float, str]]:
    """Return where `_row` begins the labels for which it has room."""
    kept: list[tuple[float, str]] = []
    for place, words in labels.items():
        wide = font.width(words)
        begin = min(max(place - wide / 2, 0), width - wide)
        if wide <= width and all(
            begin > other + font.width(others) + _APART or begin + wide + _APART < other
            for other, others in kept
        ):
            kept.append((begin, words))
    return kept


def _legend(picture: Picture, top: float, grids: Sequence[Grid], font: Font) -> None:
    """Draw the legend of what occurs, in as many lines as needed."""
    shape = (font.size, font.size * 3 // 2)
    absent = {
        "not-finite": not any(found.not_finite.any() for found in grids),
        "no-value": not any((np.isnan(f.values) & ~f.not_finite).any() for f in grids),
    }
    marks = dict.fromkeys(
        mark for g in grids for mark in legend(g.measure) if not absent.get(mark.kind)
    )
    left = float(_MARGIN)
    # Entries common to all measures come last.
    for mark in sorted(marks, key=lambda mark: mark.kind in ("not-finite", "no-value")):
        wide = shape[1] + 5 + font.width(mark.words)
        if left > _MARGIN and left + wide > _WIDTH - _MARGIN:
            left, top = float(_MARGIN), top + font.line + 4
        picture.pixels(left, top + 1, _swatch(mark.kind, shape))
        picture.text(left + shape[1] + 5, top - 1, mark.words, font)
        left += wide + 16


_PLAIN = {"healthy": HEALTHY, "too-little": TOO_LITTLE, "too-much": TOO_MUCH}
_STRIPED = {"not-finite": NOT_FINITE, "no-value": NO_VALUE}


def _swatch(kind: str, shape: tuple[int, int]) -> NDArray[np.uint8]:
    """Return the legend's pixels for a kind of `Mark`."""
    pixels = plain(_PLAIN.get(kind, "#ffffff"), shape)
    if kind in _STRIPED:
        stripe(pixels, np.ones(shape, dtype=bool), _STRIPED[kind])
    elif kind == "healthy-range":
        pixels[shape[0] // 2 : shape[0] // 2 + 3] = plain(INK, (3, shape[1]))
    return pixels
