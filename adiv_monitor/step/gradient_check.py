"""Check of whether the gradient γ is c·GᵀΦ of a layer's rows, with a known c.

Only then do the parameters determine exactly what is otherwise estimated from sampled rows.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from adiv_monitor.features.rows import Index
from adiv_monitor.maths.sums import Array, Evidence

# The cosine of two gradients that differ by a factor only is 1 up to rounding.
LIKENESS_TOLERANCE = 1e-3
# The relative size of the remainder that this allows: ranks may exchange half precision.
LARGEST_REST = math.sqrt(2 * LIKENESS_TOLERANCE)

# Gradients with at most this many entries may be multiples of each other by chance.
_FEW = 8


class Multiple(NamedTuple):
    """Fit of some entries of a gradient, `now`, as a multiple of those of another one, `then`.

    Attributes:
        factor: c ≥ 0 in now ≈ c·then; NaN if `now` is zero, or `then` may be rounding alone.
        rest: ‖now − c·then‖ / ‖now‖ beyond what rounding explains; NaN where `factor` is.
        now: ‖now‖.
        then: ‖then‖.
        entries: number of entries.
    """

    factor: float = math.nan
    rest: float = math.nan
    now: float = 0.0
    then: float = 0.0
    entries: int = 0


# Entries of two gradients, and the norm that rounding alone may give to the second.
Pair = tuple[Array, Array, float]


@np.errstate(all="ignore")  # zero or non-finite entries have no factor
def multiples(pairs: Sequence[Pair]) -> list[Multiple]:
    """Return the `Multiple` of each pair, in a few operations for all pairs."""
    filled = [pair for pair in pairs if pair[0].size]
    if not filled:
        return [Multiple()] * len(pairs)
    several_now, several_then, roundings = zip(*filled, strict=True)
    sizes = [now.size for now in several_now]
    starts = np.cumsum([0, *sizes[:-1]])
    of_now, now = _normed(np.concatenate(several_now), starts, sizes)
    of_then, then = _normed(np.concatenate(several_then), starts, sizes)
    rounding = np.array(roundings)
    squares = np.add.reduceat(then * then, starts)
    length = np.sqrt(np.add.reduceat(now * now, starts))
    ratio = np.maximum(np.add.reduceat(now * then, starts) / squares, 0.0)
    off = now - np.repeat(ratio, sizes) * then
    rest = np.sqrt(np.add.reduceat(off * off, starts)) - ratio * rounding / of_then
    now_length, then_length = _of(of_now, length), _of(of_then, np.sqrt(squares))
    known = (of_now > 0) & (of_then > 0) & (then_length > rounding)
    factor = np.where(known, ratio * of_now / of_then, math.nan)
    rest = np.where(known, np.maximum(rest, 0.0) / length, math.nan)
    columns = (factor, rest, now_length, then_length)
    found = map(Multiple, *(column.tolist() for column in columns), sizes)
    return [next(found) if pair[0].size else Multiple() for pair in pairs]


def _normed(entries: Array, starts: Index, sizes: Sequence[int]) -> tuple[Array, Array]:
    """Return the largest entry of each part, and the parts divided by it, against overflow."""
    largest = np.maximum.reduceat(np.abs(entries), starts)
    return largest, entries / np.repeat(largest, sizes)


def _of(largest: Array, length: Array) -> Array:
    """Return the norm of a part from the norm of the part divided by its largest entry."""
    return np.where((largest > 0) & (largest < math.inf), largest * length, largest)


class Compared(NamedTuple):
    """Comparisons of the known entries of a layer's gradient.

    Attributes:
        since: comparison of the first parameter's entries with those that backward left; NaN if
            the latter are not known.
        calls: by index of a parameter, comparison with the contributions of the calls.
    """

    since: Multiple
    calls: Mapping[int, Multiple]


def compared(several: Sequence[Evidence[Array]]) -> list[Compared]:
    """Compare the entries of several layers; the results are in the same order."""
    pairs: list[Pair] = []
    places: list[tuple[bool, list[int]]] = []
    for seen in several:
        rounding, first, then = seen.rounding, seen.now[0] if seen.now else None, seen.then
        has_then = False
        if then is not None and first is not None and then.shape == first.shape:
            has_then = True
            pairs += ((first, then, rounding),)
        calls: list[int] = []
        for place, own in enumerate(seen.contributed):
            now = seen.now[place]
            if own is not None and now is not None:
                calls += (place,)
                pairs += ((now, own, rounding),)
        places += ((has_then, calls),)
    found = iter(multiples(pairs))
    return [
        Compared(next(found) if has_then else Multiple(), {place: next(found) for place in calls})
        for has_then, calls in places
    ]


def since_backward(seen: Evidence[Array]) -> float:
    """Return the factor of the gradient since the end of the last pass, from the ranks' `since`.

    NaN if it was not multiplied by the same factor in all ranks: then they reduced the gradient
    only after that pass.
    """
    told = () if seen.since is None else seen.since
    known = [(factor, rest) for factor, rest in told if not math.isnan(factor)]
    if not known:
        return math.nan
    factors, rests = zip(*known, strict=True)
    differ = max(factors) - min(factors) > LIKENESS_TOLERANCE * max(factors)
    return math.nan if differ or max(rests) > LARGEST_REST else float(factors[0])


def speaks_against(seen: Evidence[Array], found: Compared, gamma: float, scale: float) -> str:
    """Return why γ is not c·GᵀΦ of these rows with a known c; "" if nothing contradicts it.

    Args:
        seen: evidence of the layer.
        found: comparisons of its entries.
        gamma: ‖γ‖².
        scale: the factor by which the optimizer divides `.grad` (AMP).
    """
    if gamma == 0 or not math.isfinite(gamma):  # nothing was left to be in any units
        return ""
    factor = math.nan if seen.factor is None else float(seen.factor)
    if math.isnan(factor):
        return "other" if contributed(seen, found) == "more" else "unknown"
    if found.since.rest > LARGEST_REST:
        return "edited"
    if earlier_share(seen, gamma) > 0:
        return "earlier"
    if reason := contributed(seen, found, factor * scale):
        return reason
    if seen.probe is not None:
        difference, whole = np.linalg.norm(seen.probe, axis=1)
        if difference > 10 * seen.tolerance * whole + factor * seen.rounding:
            return "more"
    return ""


def earlier_share(seen: Evidence[Array], gamma: float) -> float:
    """Return ‖gradient before the rows'‖ / ‖γ‖, in the units of γ; 0 if rounding explains it.

    Args:
        seen: evidence of the layer.
        gamma: ‖γ‖².
    """
    if seen.foreign is None or seen.factor is None:
        return 0.0
    held = float(seen.foreign)
    if not held > seen.rounding or not 0 < gamma < math.inf:
        return 0.0
    share = held * float(seen.factor) / math.sqrt(gamma)
    return share if seen.tolerance < share < math.inf else 0.0


def contributed(
    seen: Evidence[Array],
    found: Compared,
    factor: float = math.nan,
    tolerance: float | None = None,
) -> str:
    """Return why the gradient is not one factor times the calls' contributions, or "".

    The result is "" if the gradient is such a multiple, or if nothing contradicts it.

    Args:
        seen: evidence of the layer.
        found: comparisons of its entries.
        factor: the factor; NaN if unknown.
        tolerance: largest difference by rounding, relative to the gradient; None: that of the
            layer.
    """
    calls, rounding = found.calls, seen.rounding
    tolerance = seen.tolerance if tolerance is None else tolerance
    if math.isnan(factor):
        known = [of.factor for of in calls.values() if not math.isnan(of.factor)]
        factor = known[0] if known else factor
    for place, of in calls.items():
        if math.isnan(of.factor):
            if of.then > rounding:  # the gradient is zero
                return "more"
            # The rows contribute nothing to this parameter beyond rounding, so nothing else may.
            if of.now > (2 * factor * rounding if rounding else 0.0):
                return "more"
        elif of.rest > tolerance:
            return "more"
        elif abs(of.factor - factor) > tolerance * factor:
            if place:
                return "apart"
            return "unknown" if of.entries > _FEW else "more"
    return ""
