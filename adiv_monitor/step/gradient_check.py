"""Whether the gradient γ is c·GᵀΦ of a layer's rows, with a known c, or what speaks against it.

Only if it is do the parameters say exactly what would else be estimated from sampled rows.
"""

import math

import numpy as np

from adiv_monitor.maths.sums import Array, Evidence

# The cosine of two gradients that are alike but for a factor is 1 but for rounding.
LIKENESS_TOLERANCE = 1e-3
# So much of the one may then be no multiple of the other: processes may exchange half precision.
LARGEST_REST = math.sqrt(2 * LIKENESS_TOLERANCE)

# Gradients of so few entries may be multiples of each other by chance.
_FEW = 8


def by_entries(seen: Evidence[Array]) -> tuple[float, float]:
    """How some entries of the first parameter's gradient changed since backward; `as_multiple`."""
    now = seen.now[0] if seen.now else None
    if seen.then is None or now is None or len(seen.then) != len(now):
        return math.nan, math.nan
    return as_multiple(now, seen.then, seen.rounding)


def as_multiple(now: Array, then: Array, rounding: float = 0.0) -> tuple[float, float]:
    """The factor c ≥ 0 in now ≈ c·then, and how much of `now` is no multiple, relative to it.

    Args:
        now: some entries of a gradient.
        then: the same entries of another one.
        rounding: the length that rounding may give to `then`.

    Returns:
        c and ‖now − c·then‖ / ‖now‖, what rounding explains taken off; NaN if `now` is zero, or
        `then` may be nothing but rounding.
    """
    of_now, of_then = (np.abs(entries).max(initial=0.0) for entries in (now, then))
    if not of_now > 0 or not of_then > 0:
        return math.nan, math.nan
    if _length(then) <= rounding:
        return math.nan, math.nan
    now, then = now / of_now, then / of_then  # so that no square is too large, or too small
    ratio = max(float(now @ then / (then @ then)), 0.0)
    rest = max(float(np.linalg.norm(now - ratio * then)) - ratio * rounding / of_then, 0.0)
    return ratio * of_now / of_then, rest / float(np.linalg.norm(now))


def since_backward(seen: Evidence[Array]) -> float:
    """By what the gradient was multiplied since the last pass was over, `since_ended` of processes.

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


def speaks_against(seen: Evidence[Array], gamma: float, scale: float) -> str:
    """Why γ is not c·GᵀΦ of these rows with a known c; "" if nothing is known against it.

    Args:
        seen: what was seen of the layer.
        gamma: ‖γ‖².
        scale: what the optimizer divides `.grad` by (AMP).
    """
    if gamma == 0 or not math.isfinite(gamma):  # nothing was left to be in any units
        return ""
    factor = math.nan if seen.factor is None else float(seen.factor)
    if math.isnan(factor):
        return "other" if contributed(seen) == "more" else "unknown"
    _, rest = by_entries(seen)
    if rest > LARGEST_REST:
        return "edited"
    # The gradient as a whole is ‖γ‖; what was there before the rows is in units of its own.
    held = 0.0 if seen.foreign is None else float(seen.foreign)
    if held > seen.rounding and held * factor > seen.tolerance * math.sqrt(gamma):
        return "more"
    if reason := contributed(seen, factor * scale):
        return reason
    if seen.probe is not None:
        difference, whole = np.linalg.norm(seen.probe, axis=1)
        if difference > 10 * seen.tolerance * whole + factor * seen.rounding:
            return "more"
    return ""


def contributed(
    seen: Evidence[Array], factor: float = math.nan, tolerance: float | None = None
) -> str:
    """Why what the calls handed on is not the gradient, times one factor; "" if it is, or unknown.

    Args:
        seen: what was seen of the layer.
        factor: the one; NaN if unknown.
        tolerance: how far rounding may take them apart, relative to the gradient; None: that of
            the layer.
    """
    tolerance = seen.tolerance if tolerance is None else tolerance
    pairs = enumerate(zip(seen.contributed, seen.now, strict=False))
    known = {i: (own, now) for i, (own, now) in pairs if own is not None and now is not None}
    found = {i: as_multiple(now, own, seen.rounding) for i, (own, now) in known.items()}
    if math.isnan(factor):
        factor = next((ratio for ratio, _ in found.values() if not math.isnan(ratio)), factor)
    for place, (ratio, rest) in found.items():
        own, now = known[place]
        if math.isnan(ratio):
            if _length(own) > seen.rounding:  # the gradient is zero
                return "more"
            # No row speaks of this parameter, beyond rounding, and nothing else may.
            explained = 2 * factor * seen.rounding if seen.rounding else 0.0
            if _length(now) > explained:
                return "more"
        elif rest > tolerance:
            return "more"
        elif abs(ratio - factor) > tolerance * factor:
            if place:
                return "apart"
            return "unknown" if len(own) > _FEW else "more"
    return ""


def _length(entries: Array) -> float:
    """‖entries‖, no square of which is too large, or too small."""
    largest = float(np.abs(entries).max(initial=0.0))
    return largest * float(np.linalg.norm(entries / largest)) if 0 < largest < math.inf else largest
