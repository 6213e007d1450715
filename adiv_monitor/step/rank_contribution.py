"""A rank's contribution to the report of a measured step: plain numbers that can be sent."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic

import numpy as np

from adiv_monitor.maths.attention_sums import AttentionSums
from adiv_monitor.maths.records import replaced
from adiv_monitor.maths.sums import Array, Dots, LayerSums, T, Vector, of_rows
from adiv_monitor.report import StepReport
from adiv_monitor.step.parameter_steps import PieceNumbers
from adiv_monitor.step.run_history import RunHistory
from adiv_monitor.step.transfer import StepSums

# The error of a rule that does not describe its layer is far above half precision's rounding.
RULE_TOLERANCE = 0.05

_SKIPPED = "The optimizer skipped the step, because a gradient is not finite: not measured."
_MOVED = (
    "The optimizer moved the weights before the gradient was computed (as SAM does), so its "
    "update does not start where the gradient was computed: not measured."
)


# By key of a piece, the share of its products that this rank counts; and `partial` as in `Dots`.
PieceShares = tuple[dict[int, float], bool]


@dataclass(frozen=True)
class Facts:
    """Facts about the step as a whole.

    Attributes:
        updated: an optimizer has stepped.
        gradient_scale: the factor by which a fused optimizer divided the gradients.
        gradient_changed: the optimizer changed `.grad` during its step.
        gradient_lost: the optimizer changed `.grad`, and there was no copy.
        has_applied: the applied update was kept. Where a = u is expected, only the numbers that
            confirm it are kept.
        weights_changed: the weights changed after the optimizer's step.
    """

    updated: bool
    gradient_scale: float
    gradient_changed: bool
    gradient_lost: bool
    has_applied: bool
    weights_changed: bool


@dataclass
class Contribution(Generic[T]):
    """A rank's contribution to a report.

    Attributes:
        report: the report, without readings of layers and attentions, and with a `turn` without
            its elements (see `elements`). Realised changes are those of this rank's samples,
            `losses` those of its batches; `alignment` is already that of all ranks.
        layers: by path, the records of layers whose rows are known.
        facts: facts about the step as a whole.
        refused: why the step can't be measured at all; empty if it can.
        misdescribed: path → why a layer must not be measured again: its rule does not hold.
        rows_lost: paths of layers that had rows here but are not in `layers`.
        checked: layers whose rule has been verified (an output of zeros verifies nothing).
        elements: number of elements of the trained parameters whose turn it is.
        attention: records of attentions by path.
        no_attention: path → why there is no record.
        is_settled: the rows are in the units of the optimizer's gradient.
    """

    report: StepReport
    layers: dict[str, LayerSums[T]]
    facts: Facts
    refused: tuple[str, ...] = ()
    misdescribed: dict[str, str] = field(default_factory=dict)
    rows_lost: tuple[str, ...] = ()
    checked: tuple[str, ...] = ()
    elements: int = 0
    attention: dict[str, AttentionSums[T]] = field(default_factory=dict)
    no_attention: dict[str, str] = field(default_factory=dict)
    is_settled: bool = False


RankContribution = Contribution[Array]


def make_contribution(
    found: StepSums[Array],
    pieces: Mapping[str, PieceShares],
    *,
    number: int,
    unreached: Mapping[str, str],
    notes: Sequence[str],
    keeps_gradient: bool,
) -> RankContribution:
    """Return the contribution from the numbers of a step, before any measure is computed.

    Args:
        found: the numbers.
        pieces: by layer, the pieces of its parameters.
        number: number of the step.
        unreached: path → why there are no numbers.
        notes: notes for the reader.
        keeps_gradient: γ was copied, so that the optimizer could not change it.
    """
    flags, facts = found.flags, _facts(found, keeps_gradient)
    report = StepReport(number, {}, {}, 0.0, tuple(notes))
    skipped = flags.skipped is not None and flags.skipped.any()
    moved = flags.moved is not None and flags.moved.any()
    if skipped or moved:
        refused = tuple(why for why, is_so in ((_SKIPPED, skipped), (_MOVED, moved)) if is_so)
        return RankContribution(report, {}, facts, refused)
    errors = {
        path: float(layer.evidence.rule_error)
        for path, layer in found.layers.items()
        if layer.evidence.rule_error is not None
    }
    misdescribed, lost = _misdescribed(errors), _lost(found.layers)
    with np.errstate(all="ignore"):  # terms of non-finite numbers are not needed
        products = _by_piece(found.products, facts.gradient_scale)
        layers = {
            path: _with_dots(layer, _dots(products, pieces[path]))
            for path, layer in found.layers.items()
            if path not in misdescribed and path not in lost
        }
    change, changes = flags.loss_change, flags.loss_changes
    report = replace(
        report,
        unsupported={**unreached, **lost, **misdescribed},
        realised_loss_change=None if change is None else float(change),
        realised_loss_changes=() if changes is None else tuple(changes.tolist()),
    )
    return RankContribution(
        report,
        layers,
        facts,
        misdescribed=misdescribed,
        rows_lost=(*misdescribed, *lost),
        checked=tuple(path for path, error in errors.items() if error <= RULE_TOLERANCE),
    )


def learn(history: RunHistory, part: RankContribution) -> None:
    """Record this step's facts in the run history, for the coming steps."""
    if part.facts.updated and part.layers:
        history.seen |= part.layers.keys() | part.report.unsupported.keys()
        history.learn(
            gradient_changed=part.facts.gradient_changed,
            weights_changed=part.facts.weights_changed,
        )


def _facts(found: StepSums[Array], keeps_gradient: bool) -> Facts:
    products, flags = found.products, found.flags
    # Without an optimizer there are no products of updates.
    updated, has_applied = bool(products.w_w), bool(products.a_w)
    changed = flags.gradient_changed is not None and bool(flags.gradient_changed.any())
    weights_changed = flags.weights_changed is not None and bool(flags.weights_changed.any())
    return Facts(
        updated=updated,
        gradient_scale=1.0 if flags.gradient_scale is None else float(flags.gradient_scale),
        gradient_changed=changed,
        gradient_lost=changed and not keeps_gradient,
        has_applied=has_applied,
        weights_changed=weights_changed or (has_applied and _applied_differs(products)),
    )


def _applied_differs(products: PieceNumbers[Array]) -> bool:
    # Computed in the same way, they are equal to the last bit unless θ has changed.
    pairs = zip(products.w_w, products.a_a, strict=True)
    return not all(np.array_equal(w, a, equal_nan=True) for w, a in pairs)


ByPiece = tuple[Sequence[int], Array, list[bool]]  # keys; (products, pieces); which are known


def _by_piece(products: PieceNumbers[Array], gradient_scale: float) -> ByPiece:
    """Return the dot products in the order of `Dots`, with γ in the optimizer's units."""
    unit = gradient_scale
    every = (
        (products.gamma_gamma, unit**2),
        *((products.w_w, 1.0), (products.w_gamma, unit)),
        *((products.a_a, 1.0), (products.a_w, 1.0), (products.a_gamma, unit)),
    )
    numbers = np.zeros((len(every), len(products.keys)))
    for row, (parts, units) in zip(numbers, every, strict=True):
        row[:] = np.concatenate(parts) / units if parts else 0.0
    return products.keys, numbers, [bool(parts) for parts, _ in every]


def _dots(products: ByPiece, pieces: PieceShares) -> Dots[float]:
    """Return the dot products of all parameters of a layer."""
    (keys, numbers, known), (shares, partial) = products, pieces
    of_pieces = numbers[:, [keys.index(key) for key in shares]]
    first, *others = (of_pieces @ np.array(list(shares.values()))).tolist()
    w_w, w_gamma, a_a, a_w, a_gamma = [
        x if is_known else None for x, is_known in zip(others, known[1:], strict=True)
    ]
    return Dots(first, w_w, w_gamma, a_a, a_w, a_gamma, partial)


def _with_dots(layer: LayerSums[Array], dots: Dots[float]) -> LayerSums[Array]:
    """Add the parameters' products and `Evidence.terms`, by ‖g_r φ_rᵀ‖² = (D G)_r·g_r.

    D is the diagonal of the scales.
    """
    squares = of_rows(layer, Vector.G, Vector.G)
    if layer.blocks is not None:
        squares = of_rows(layer, Vector.OWN, Vector.G)
    elif layer.scale is not None:
        squares = squares * layer.scale
    else:  # ‖J_r‖ ≥ ‖J_r γ‖ / ‖γ‖ with the Jacobian J_r of a row
        gamma_gamma = dots.gamma_gamma or 1.0
        squares = squares * of_rows(layer, Vector.E, Vector.E) / gamma_gamma
    seen, rows = layer.evidence, layer.sampled
    length = np.sqrt(np.maximum(squares, 0.0)).sum()
    terms = float(length * rows.total / max(rows.seen, 1))
    return replaced(layer, parameters=dots, evidence=replaced(seen, terms=terms))


def _misdescribed(errors: Mapping[str, float]) -> dict[str, str]:
    return {
        path: f"its output differs from that of its rule (relative error {error:.2g}): a hook or "
        "a subclass changes it, or the registered rule is wrong"
        for path, error in errors.items()
        if error > RULE_TOLERANCE
    }


def _lost(layers: Mapping[str, LayerSums[Array]]) -> dict[str, str]:
    seen = {path: layer.evidence for path, layer in layers.items()}
    return {
        path: "a rerun of its call does not return what the call returned (relative error "
        f"{error:.2g}), so its rows are not known"
        for path, e in seen.items()
        if e.replay_error is not None and (error := float(e.replay_error)) > 10 * e.tolerance
    }
