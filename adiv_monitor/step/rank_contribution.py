"""A rank's contribution to the report of a measured step: plain numbers that can be sent."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from adiv_monitor.capture.weights.pieces import Key
from adiv_monitor.maths.sums import NO_SUMS, OF_PARAMETERS, ONCE, Array, StepSums
from adiv_monitor.report import StepReport


@dataclass
class RankContribution:
    """A rank's contribution to a report.

    Attributes:
        report: the report, without readings of layers and attentions, and with a `turn` without
            its elements (see `elements`). Realised changes are those of this rank's samples,
            `losses` those of its batches; `alignment` is already that of all ranks.
        sums: the numbers of the layers whose rows are known.
        refused: why the step can't be measured at all; empty if it can.
        misdescribed: path → why a layer must not be measured again: its rule does not hold.
        rows_lost: paths of layers that had rows here but are not in `sums`.
        elements: number of elements of the trained parameters whose turn it is.
        attention: records of attentions by path, see `maths/scores.py`.
        no_attention: path → why there is no record.
    """

    report: StepReport
    sums: StepSums = NO_SUMS
    refused: tuple[str, ...] = ()
    misdescribed: dict[str, str] = field(default_factory=dict)
    rows_lost: tuple[str, ...] = ()
    elements: int = 0
    attention: dict[str, Array] = field(default_factory=dict)
    no_attention: dict[str, str] = field(default_factory=dict)


@np.errstate(all="ignore")  # terms of non-finite numbers are not needed
def add_parameters(
    sums: StepSums,
    dots: Mapping[str, Array],
    pieces: Mapping[str, Mapping[Key, float]],
    keys: Sequence[Key],
) -> None:
    """Add the numbers of the parameters of each layer.

    Args:
        sums: the numbers of the layers.
        dots: dot products, by the names of `DOTS`, of the pieces of parameters.
        pieces: by layer, by key of a piece, the share of its products that this rank counts.
        keys: the pieces.
    """
    shares, layers = [pieces[path] for path in sums.paths], sums.layers
    place = {key: i for i, key in enumerate(keys)}
    at = np.array([place[key] for of in shares for key in of], dtype=np.int64)
    counted = [share for of in shares for share in of.values()]
    layer = np.repeat(np.arange(len(shares)), [len(of) for of in shares])
    # Without an applied update of its own, a = u.
    like = {"a_a": "w_w", "a_w": "w_w", "a_gamma": "w_gamma", **ONCE}
    is_first = np.zeros(len(at))
    is_first[np.unique(at, return_index=True)[1]] = 1
    for name in OF_PARAMETERS:
        values = dots.get(name, dots.get(like.get(name, ""), np.zeros(len(keys))))
        weights = is_first * counted if name in ONCE else counted
        layers[name] = np.bincount(layer, values[at] * weights, len(shares))
    layers["terms"] = _terms(sums)


def _terms(sums: StepSums) -> Array:
    """Return `terms` of each layer, by ‖g_r φ_rᵀ‖² = (D G)_r·g_r.

    D is the diagonal of the scales. Without scales ‖J_r‖ ≥ ‖J_r γ‖ / ‖γ‖ with the Jacobian J_r of
    a row.
    """
    layers, rows = sums.layers, sums.rows
    groups, gamma_gamma = (layers[name][rows["layer"]] for name in ("groups", "gamma_gamma"))
    of_gamma = rows["G_G"] * rows["e_e"] / np.where(gamma_gamma == 0, 1.0, gamma_gamma)
    squares = np.select(
        [groups > 1, groups == 1], [rows["own_G"], rows["G_G"] * rows["scale"]], of_gamma
    )
    length = sums.total(np.sqrt(np.maximum(squares, 0.0)))
    found: Array = length * layers["total"] / np.maximum(sums.seen, 1)
    return found
