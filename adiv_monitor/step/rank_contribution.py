"""A rank's contribution to the report of a measured step: plain numbers that can be sent."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from adiv_monitor.capture.weights.pieces import Key
from adiv_monitor.maths.attention_sums import AttentionSums
from adiv_monitor.maths.sums import NO_SUMS, OF_PARAMETERS, ONCE, Array, StepSums
from adiv_monitor.report import StepReport

# The error of a rule that does not describe its layer is far above half precision's rounding.
RULE_TOLERANCE = 0.05

_SKIPPED = "The optimizer skipped the step, because a gradient is not finite: not measured."


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
        checked: layers whose rule has been verified (an output of zeros verifies nothing).
        elements: number of elements of the trained parameters whose turn it is.
        attention: records of attentions by path.
        no_attention: path → why there is no record.
        is_settled: the rows are in the units of the optimizer's gradient.
        updated: an optimizer has stepped.
        gradient_changed: the optimizer changed `.grad` during its step.
        gradient_lost: the optimizer changed `.grad`, and there was no copy.
        has_applied: the applied update is known: it was kept, or it is the optimizer's.
        weights_changed: the weights changed after the optimizer's step.
    """

    report: StepReport
    sums: StepSums = NO_SUMS
    refused: tuple[str, ...] = ()
    misdescribed: dict[str, str] = field(default_factory=dict)
    rows_lost: tuple[str, ...] = ()
    checked: tuple[str, ...] = ()
    elements: int = 0
    attention: dict[str, AttentionSums[Array]] = field(default_factory=dict)
    no_attention: dict[str, str] = field(default_factory=dict)
    is_settled: bool = False
    updated: bool = False
    gradient_changed: bool = False
    gradient_lost: bool = False
    has_applied: bool = False
    weights_changed: bool = False


def make_contribution(
    sums: StepSums,
    flags: Mapping[str, Sequence[Array]],
    pieces: Mapping[str, Mapping[Key, float]],
    keys: Sequence[Key],
    report: StepReport,
    *,
    keeps_gradient: bool,
) -> RankContribution:
    """Return the contribution from the numbers of a step, before any measure is computed.

    Args:
        sums: the numbers of the layers.
        flags: those of the step as a whole; see `Outgoing`.
        pieces: by layer, by key of a piece, the share of its products that this rank counts.
        keys: the pieces of which `flags` has dot products.
        report: the report so far.
        keeps_gradient: γ was copied, so that the optimizer could not change it.
    """

    def is_set(name: str) -> bool:
        return any(of.any() for of in flags.get(name, ()))

    dots = {name: np.concatenate(of) for name in OF_PARAMETERS if (of := flags.get(name))}
    changed, has_applied = is_set("gradient_changed"), "a_a" in dots
    # Computed in the same way, they are equal to the last bit unless θ has changed.
    weights_changed = is_set("weights_changed") or (
        has_applied and not np.array_equal(dots["w_w"], dots["a_a"], equal_nan=True)
    )
    part = RankContribution(
        report,
        updated="w_w" in dots,
        gradient_changed=changed,
        gradient_lost=changed and not keeps_gradient,
        has_applied=has_applied or ("w_w" in dots and not weights_changed),
        weights_changed=weights_changed,
    )
    if is_set("skipped"):
        return replace(part, refused=(_SKIPPED,))
    errors = dict(zip(sums.paths, sums.layers["rule_error"].tolist(), strict=True))
    misdescribed = _misdescribed(errors)
    is_kept = [path not in misdescribed for path in sums.paths]
    sums = sums.pick(np.flatnonzero(is_kept))
    with np.errstate(all="ignore"):  # terms of non-finite numbers are not needed
        _add_dots(sums, dots, keys, pieces)
        sums.layers["terms"] = _terms(sums)
    change, changes = flags.get("loss_change"), flags.get("loss_changes")
    return replace(
        part,
        report=replace(
            report,
            unsupported={**report.unsupported, **misdescribed},
            realised_loss_change=float(change[0]) if change else None,
            realised_loss_changes=tuple(changes[0].tolist()) if changes else (),
        ),
        sums=sums,
        misdescribed=misdescribed,
        checked=tuple(path for path, error in errors.items() if error <= RULE_TOLERANCE),
    )


def _add_dots(
    sums: StepSums,
    dots: Mapping[str, Array],
    keys: Sequence[Key],
    pieces: Mapping[str, Mapping[Key, float]],
) -> None:
    """Add the dot products of all parameters of each layer."""
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


def _misdescribed(errors: Mapping[str, float]) -> dict[str, str]:
    return {
        path: f"its output differs from that of its rule (relative error {error:.2g}): a hook or "
        "a subclass changes it, or the registered rule is wrong"
        for path, error in errors.items()
        if error > RULE_TOLERANCE
    }
