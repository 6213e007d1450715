"""Whether the gradient γ is c·GᵀΦ of a layer's rows, with a known c, or what speaks against it.

Only if it is do the parameters say exactly what would else be estimated from sampled rows.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from adiv_monitor.features.rows import Index
from adiv_monitor.maths.sums import Array, Evidence

# The cosine of two gradients that are alike but for a factor is 1 but for rounding.
LIKENESS_TOLERANCE = 1e-3
# So much of the one may then be no multiple of the other: ranks may exchange half precision.
LARGEST_REST = math.sqrt(2 * LIKENESS_TOLERANCE)

# Gradients of so few entries may be multiples of each other by chance.
_FEW = 8


class Multiple(NamedTuple):
    """How far some entries of a gradient, `now`, are a multiple of those of another one, `then`.

    Attributes:
        factor: c ≥ 0 in now ≈ c·then; NaN if `now` is zero, or `then` may be nothing but rounding.
        rest: ‖now − c·then‖ / ‖now‖, what rounding explains taken off; NaN likewise.
        now: ‖now‖.
        then: ‖then‖.
        entries: how many there are.
    """

    factor: float = math.nan
    rest: float = math.nan
    now: float = 0.0
    then: float = 0.0
    entries: int = 0


class Pair(NamedTuple):
    """Entries of two gradients, and the length that rounding may give to the second."""

    now: Array
    then: Array
    rounding: float = 0.0


@np.errstate(all="ignore")  # what is zero or not finite has no factor
def multiples(pairs: Sequence[Pair]) -> list[Multiple]:
    """Each pair by itself, in a few operations for all."""
    filled = [pair for pair in pairs if pair.now.size]
    if not filled:
        return [Multiple()] * len(pairs)
    sizes = [pair.now.size for pair in filled]
    starts = np.cumsum([0, *sizes[:-1]])
    of_now, now = _normed(np.concatenate([pair.now for pair in filled]), starts, sizes)
    of_then, then = _normed(np.concatenate([pair.then for pair in filled]), starts, sizes)
    rounding = np.array([pair.rounding for pair in filled])
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
    return [next(found) if pair.now.size else Multiple() for pair in pairs]


def _normed(entries: Array, starts: Index, sizes: Sequence[int]) -> tuple[Array, Array]:
    """The largest of each part, and parts divided by it: no square is too large, or too small."""
    largest = np.maximum.reduceat(np.abs(entries), starts)
    return largest, entries / np.repeat(largest, sizes)


def _of(largest: Array, length: Array) -> Array:
    """The length of what had the largest entry taken out."""
    return np.where((largest > 0) & (largest < math.inf), largest * length, largest)


class Compared(NamedTuple):
    """How the entries that are known of a layer's gradient compare.

    Attributes:
        since: the first parameter's with those that backward left; NaN where these are not known.
        calls: by the place of a parameter, with what calls have contributed to it.
    """

    since: Multiple
    calls: Mapping[int, Multiple]


def compared(several: Sequence[Evidence[Array]]) -> list[Compared]:
    """What the entries of several layers say, in the same order."""
    pairs: list[Pair] = []
    places: list[tuple[bool, list[int]]] = []
    for seen in several:
        rounding, first = seen.rounding, seen.now[0] if seen.now else None
        then = seen.then
        has_then = then is not None and first is not None and len(then) == len(first)
        if has_then:
            pairs.append(Pair(first, then, rounding))  # type: ignore[arg-type]  # mypy forgets
        calls = []
        for place, (own, now) in enumerate(zip(seen.contributed, seen.now, strict=False)):
            if own is not None and now is not None:
                calls.append(place)
                pairs.append(Pair(now, own, rounding))
        places.append((has_then, calls))
    found = iter(multiples(pairs))
    return [
        Compared(next(found) if has_then else Multiple(), {place: next(found) for place in calls})
        for has_then, calls in places
    ]


def since_backward(seen: Evidence[Array]) -> float:
    """By what the gradient was multiplied since the last pass was over, `since_ended` of ranks.

    NaN where it was not multiplied by one factor in all of them: then they put it together only
    after that pass.
    """
    told = () if seen.since is None else seen.since
    known = [(factor, rest) for factor, rest in told if not math.isnan(factor)]
    if not known:
        return math.nan
    factors, rests = zip(*known, strict=True)
    differ = max(factors) - min(factors) > LIKENESS_TOLERANCE * max(factors)
    return math.nan if differ or max(rests) > LARGEST_REST else float(factors[0])


def speaks_against(seen: Evidence[Array], found: Compared, gamma: float, scale: float) -> str:
    """Why γ is not c·GᵀΦ of these rows with a known c; "" if nothing is known against it.

    Args:
        seen: what was seen of the layer.
        found: how its entries compare.
        gamma: ‖γ‖².
        scale: what the optimizer divides `.grad` by (AMP).
    """
    if gamma == 0 or not math.isfinite(gamma):  # nothing was left to be in any units
        return ""
    factor = math.nan if seen.factor is None else float(seen.factor)
    if math.isnan(factor):
        return "other" if contributed(seen, found) == "more" else "unknown"
    if found.since.rest > LARGEST_REST:
        return "edited"
    # The gradient as a whole is ‖γ‖; what was there before the rows is in units of its own.
    held = 0.0 if seen.foreign is None else float(seen.foreign)
    if held > seen.rounding and held * factor > seen.tolerance * math.sqrt(gamma):
        return "more"
    if reason := contributed(seen, found, factor * scale):
        return reason
    if seen.probe is not None:
        difference, whole = np.linalg.norm(seen.probe, axis=1)
        if difference > 10 * seen.tolerance * whole + factor * seen.rounding:
            return "more"
    return ""


def contributed(
    seen: Evidence[Array],
    found: Compared,
    factor: float = math.nan,
    tolerance: float | None = None,
) -> str:
    """Why what the calls handed on is not the gradient, times one factor; "" if it is, or unknown.

    Args:
        seen: what was seen of the layer.
        found: how its entries compare.
        factor: the one; NaN if unknown.
        tolerance: how far rounding may take them apart, relative to the gradient; None: that of
            the layer.
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
            # No row speaks of this parameter, beyond rounding, and nothing else may.
            if of.now > (2 * factor * rounding if rounding else 0.0):
                return "more"
        elif of.rest > tolerance:
            return "more"
        elif abs(of.factor - factor) > tolerance * factor:
            if place:
                return "apart"
            return "unknown" if of.entries > _FEW else "more"
    return ""
