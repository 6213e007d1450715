"""The check of gradients: the factors of γ = c·GᵀΦ, and whether γ is anything else.

Only then do the parameters determine exactly what is otherwise estimated from sampled rows. See
`capture/check.py` for the equations.
"""

import math
from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from adiv_monitor.maths.sums import Array, StepSums

# The relative difference of numbers that are equal up to rounding.
LIKENESS_TOLERANCE = 1e-3
# Rounding of the equations, which have at most this many vectors.
_ROUNDING = 4.0
# So many equations of one layer tell the factor of all.
_EQUATIONS = 8
# Fewer equations than this may be solved by chance.
_ENOUGH = 3
# A factor is 1 if it differs by less than this part of the tolerance.
_EXACT = 1e-3
# A factor of a gradient that was set to zero: rows have a direction, but no length.
_ZEROED = 1e-38


class Fit(NamedTuple):
    """Fit of γv by c·h, and by a multiple of what was there before the rows.

    Attributes:
        factor: c; NaN if there is none.
        rest: what is neither, a norm.
        now: ‖γv‖.
        rows: ‖h‖.
        earlier: norm of the part that was there before.
    """

    factor: float
    rest: float
    now: float
    rows: float
    earlier: float = math.nan


def fitted(equations: Array, factor: float | None = None) -> Fit:
    """Solve the equations of a layer by least squares.

    Args:
        equations: γv, h, and γv of what was there before.
        factor: c, if it is known.
    """
    now, *columns = equations
    length, norms = float(np.linalg.norm(now)), np.linalg.norm(columns, axis=1)
    if not np.isfinite(equations).all():
        return Fit(math.nan, math.nan, length, float(norms[0]))
    unit = np.array(columns).T / np.where(norms > 0, norms, 1.0)
    if factor is not None:
        now, unit = now - factor * columns[0], unit[:, 1:]
    found = np.linalg.lstsq(unit, now, rcond=None)[0]
    rest = float(np.linalg.norm(now - unit @ found))
    if factor is None:
        factor = float(found[0] / norms[0]) if norms[0] else math.nan
    return Fit(factor, rest, length, float(norms[0]), abs(float(found[-1])))


def settled(sums: StepSums, *, world: int = 1, lost: Collection[str] = ()) -> StepSums:
    """Return the numbers in the units of the gradient that the optimizer saw.

    The factor is mostly common to all layers. Where γ is not such a multiple, `reason` says so.

    Args:
        sums: the numbers, of one rank or merged.
        world: the number of ranks.
        lost: paths of layers of which rows are missing.
    """
    (usual, is_told), reasons, was_zeroed = _usual(sums), list[str](), sums.was_zeroed
    factors, layers = np.full(len(sums.paths), usual), sums.layers.copy()
    layers["other_share"] = 0.0
    for i, path in enumerate(sums.paths):
        reason = str(sums.layers["reason"][i])
        if was_zeroed[i]:
            factors[i] = _ZEROED
        elif sums.checked[i] and sums.layers["gamma_gamma"][i] > 0 and not reason:
            factors[i], reason, layers["other_share"][i] = _judged(sums, i, usual)
        elif not sums.checked[i] and not is_told:
            reason = reason or "seems"
        reasons.append("ranks" if reason == "more" and path in lost else reason)
    factors[np.abs(factors - 1) <= sums.tolerance * _EXACT] = 1.0
    layers["reason"] = reasons
    averaged = 1.0 if abs(usual - 1) < LIKENESS_TOLERANCE else 1 / world
    layers["gradient_factor"] = np.where(layers["gamma_gamma"] > 0, factors / averaged, np.nan)
    return replace(sums, layers=layers).in_units(factors)


def tells(sums: StepSums, layer: int) -> bool:
    """Return whether a layer's gradient was checked and is far above rounding."""
    equations = _equations(sums, layer)
    if equations.shape[1] < _EQUATIONS or sums.layers["reason"][layer]:
        return False
    return fitted(equations).rows > 100 * _noise(sums, layer)


def _usual(sums: StepSums) -> tuple[float, bool]:
    """Return the factor that most layers share, and whether no gradient speaks against it."""
    clean, others = list[float](), list[float]()
    for i in np.flatnonzero(sums.checked).tolist():
        for part in _parts(sums, i):
            fit = fitted(part)
            if not (fit.factor > 0 and fit.rows > 100 * _noise(sums, i)):
                continue
            told = part.shape[1] >= _ENOUGH and fit.rest <= sums.tolerance[i] * fit.now
            (clean if told else others).append(fit.factor)
    if clean or others:
        return float(np.median(clean or others)), bool(clean)
    return 1.0, True  # nothing tells it


def _parts(sums: StepSums, layer: int) -> list[Array]:
    """Return the equations of the weight and those of the bias, (3, equations) each."""
    of_bias = sums.of("equations", layer)["of_bias"]
    parts = (_equations(sums, layer)[:, of_bias == which] for which in (0, 1))
    return [part for part in parts if part.size]


def _equations(sums: StepSums, layer: int) -> Array:
    """Return all equations of a layer, (3, equations); see `fitted`."""
    lines = sums.of("equations", layer)
    before = np.where(np.isnan(lines["before"]), 0.0, lines["before"])  # there was none
    return np.stack([lines["now"], lines["h"], before])


def _noise(sums: StepSums, layer: int) -> float:
    """Return the norm that rounding alone may give to h."""
    return _ROUNDING * float(sums.rounding[layer])


def _judged(sums: StepSums, layer: int, usual: float) -> tuple[float, str, float]:
    """Return a layer's factor, why γ is not the gradient of its rows, and `other_share`."""
    equations, parts = _equations(sums, layer), _parts(sums, layer)
    noise, tolerance = _noise(sums, layer), float(sums.tolerance[layer])
    fit = fitted(equations)
    if not math.isfinite(fit.rest):
        return usual, "", 0.0

    def explains(fit: Fit) -> bool:
        return fit.factor > 0 and fit.rest <= tolerance * fit.now + noise * fit.factor

    for factor in (usual, fit.factor):
        found = [fitted(part, factor) for part in parts]
        if all(map(explains, found)):
            if any(of.earlier > tolerance * fit.now + noise for of in found):
                return factor, "earlier", fitted(equations, factor).earlier / fit.now
            return factor, "", 0.0
    found = [fitted(part) for part in parts]
    if len(parts) == 2 and all(explains(of) and of.rows > noise for of in found):
        return found[0].factor, "apart", 0.0
    return usual, "more", fit.rest / fit.now
