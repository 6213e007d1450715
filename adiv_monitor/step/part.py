"""What one process knows of a measured step: numbers alone, which can travel to another one."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from adiv_monitor.capture.sampling import Draw
from adiv_monitor.capture.updates import APPLIED, STEPPED, Watch
from adiv_monitor.features.rows import Index
from adiv_monitor.maths.readings import Array
from adiv_monitor.report import AlignmentReading, Turn
from adiv_monitor.step.attention_outcome import Attended

# A rule that does not describe its layer is wrong by much more than half precision's rounding.
RULE_TOLERANCE = 0.05

# Of the rows of one of several processes: ΦᵀΦ, ΦᵀG and ‖G‖².
CEILING_SUMS = ("ceiling_gram", "ceiling_cross", "ceiling_square")

# Of a layer whose parameters others use too, its own part γ′ of their gradient, in the units that
# backward left: ⟨γ, γ′⟩ and ⟨w, γ′⟩.
OWN_DOTS = ("own_gamma", "own_w")

_FLOAT32 = float(np.finfo(np.float32).eps)

_REFUSED = {
    "skipped": "The optimizer skipped the step, because a gradient is not finite: not measured.",
    "moved": (
        "The optimizer moved the weights before it asked for the gradient (as SAM does), so its "
        "update does not start where the gradient was taken: not measured."
    ),
}


@dataclass(frozen=True)
class Dealt:
    """Rows that a group of processes chose together, each of which keeps some.

    Attributes:
        first: rank of the first of these processes.
        place: of this process among them.
        count: how many they are; 1 where each has all of them.
        rows_seen: rows that they look at, all together.
        rows_total: rows that there are.
    """

    first: int
    place: int
    count: int
    rows_seen: int
    rows_total: int


@dataclass
class Looked:
    """What was looked at in a layer.

    Attributes:
        path: of the layer.
        kind: of the layer.
        pieces: keys of the trained ones.
        bias_alone: no weight is trained.
        rows_seen: rows that were looked at.
        rows_total: rows that received a gradient.
        groups: groups of the layer: how many scales a row has.
        precision: rounding of the coarsest number that a gradient went through.
        from_rows: why the parameters do not speak for the rows, if that is known beforehand.
        undefined: measures that such a layer does not have.
        vectors: names of the matrices whose row products were taken.
        entry_rows: see `Numbers`.
        asked_common: whether the rows were asked how alike they are.
        features: how many numbers of a row the weight multiplies, where a row is such a vector.
        shares: by piece, what of its dot products this process is to count, where each process
            holds a part of the parameters, so that theirs add up; else empty.
        dealt: what the rows are part of, if they were dealt out.
        followed: autograd told all that the rows' calls hand on to the parameters.
        weight_groups: groups of the weight, where a row has scales for every output because the
            weight is made of parameters.
        module: name of its module's class.
        terms: Σ_r ‖g_r φ_rᵀ‖, the sum of the lengths of all that adds up to the gradient which the
            backward passes left, as far as the rows tell.
    """

    path: str
    kind: str
    pieces: list[int]
    bias_alone: bool
    rows_seen: int
    rows_total: int
    groups: int
    precision: float
    from_rows: str
    undefined: tuple[str, ...] = ()
    vectors: tuple[str, ...] = ()
    entry_rows: Index | None = field(default=None, repr=False)
    asked_common: bool = False
    features: int | None = None
    shares: dict[int, float] = field(default_factory=dict)
    dealt: Dealt | None = None
    followed: bool = False
    weight_groups: int = 0
    module: str = ""
    terms: float = 0.0

    def without_parameters(self) -> None:
        """Parts of the parameters are missing: rows alone speak, and not of these."""
        self.from_rows = self.from_rows or "processes"
        self.undefined += ("parameter_cosine", "projection_cosine", "applied_cosine", "descent")

    @property
    def tolerance(self) -> float:
        """How far rounding may take two equal sums apart, relative to their terms."""
        # Matrix products of float32 may be taken with fewer digits (TensorFloat-32).
        return 1e-9 if self.precision < 1e-15 else max(1e-3, 4 * self.precision)

    @property
    def rounding(self) -> float:
        """How far rounding may take two sums of the same terms apart, in whatever order.

        A gradient that is no longer than this may be nothing else: that of an attention's key bias
        is zero in exact arithmetic. Nothing can be concluded from it.
        """
        # Coarser numbers than float32 are summed up in float32.
        return 4 * min(self.precision, _FLOAT32) * self.terms


@dataclass
class LayerPart:
    """One layer.

    Attributes:
        looked: what was looked at.
        values: numbers by name.
        dots: dot products of vectors that hold all its parameters, as in `Numbers`.
        draw: which of the process's rows these are, where they are to be part of a larger sample.
    """

    looked: Looked
    values: dict[str, Array]
    dots: dict[str, float]
    draw: Draw | None = None


@dataclass(frozen=True)
class Facts:
    """What is so of the step as a whole.

    Attributes:
        updated: an optimizer has stepped.
        gradient_scale: what a fused optimizer divided the gradients by.
        gradient_changed: the optimizer changed `.grad` during its step.
        gradient_lost: it did, and there was no copy.
        has_applied: the applied update was kept. Where a = u is expected there is only what proves
            it.
        weights_changed: the weights changed after the optimizer's step.
    """

    updated: bool
    gradient_scale: float
    gradient_changed: bool
    gradient_lost: bool
    has_applied: bool
    weights_changed: bool


@dataclass
class Part:
    """A process's part of a report.

    Attributes:
        layers: by path, those whose rows are known.
        facts: of the step as a whole.
        refused: why the step can't be measured at all; empty if it can.
        unsupported: path → why there is no reading.
        misdescribed: path → why a layer must not be watched again: its rule does not hold.
        rows_lost: paths of layers that had rows here which are not among `layers`.
        checked: layers whose rule was seen to hold (an output of zeros shows nothing).
        notes: what else a reader must know.
        unmeasured: as in `StepReport`.
        interval: as in `StepReport`.
        elements: of all parameters that are trained, those whose turn it is.
        coverage: as in `StepReport`.
        loss_change: how the loss really changed, if that was measured.
        loss_changes: of every sample.
        attended: by path, attentions.
        attention: by path, their numbers.
        no_attention: path → why there are none.
        alignment: as in `StepReport`; of all processes already.
        turn: as in `StepReport`, without the elements.
        losses: as in `StepReport`; of this process's batches.
        learning_rates: as in `StepReport`.
    """

    layers: dict[str, LayerPart]
    facts: Facts
    refused: list[str]
    unsupported: dict[str, str]
    misdescribed: dict[str, str]
    rows_lost: set[str]
    checked: set[str]
    notes: list[str]
    unmeasured: dict[str, int] = field(default_factory=dict)
    interval: int = 0
    elements: int = 0
    coverage: float = 0.0
    loss_change: float | None = None
    loss_changes: tuple[float, ...] = ()
    attended: dict[str, Attended] = field(default_factory=dict)
    attention: dict[str, dict[str, Array]] = field(default_factory=dict)
    no_attention: dict[str, str] = field(default_factory=dict)
    alignment: Mapping[str, AlignmentReading] = field(default_factory=dict)
    turn: Turn | None = None
    losses: Mapping[int, float] = field(default_factory=dict)
    learning_rates: tuple[float, ...] = ()


def make_part(
    looked: Mapping[str, Looked],
    values: dict[str, dict[str, Array]],
    flags: Mapping[str, Array],
    products: Mapping[str, Mapping[int, Array]],
    *,
    unreached: Mapping[str, str],
    notes: list[str],
    keeps_gradient: bool,
) -> Part:
    """What the numbers of a step say before any measure is taken.

    Args:
        looked: path → what was looked at there.
        values: path → name → numbers.
        flags: name → what is so of the step as a whole.
        products: name → key of a piece → numbers that add up to a dot product.
        unreached: path → why there are no numbers.
        notes: what a reader must know.
        keeps_gradient: γ was copied, so that the optimizer could not change it.
    """
    facts = _facts(flags, products, keeps_gradient)
    if refused := [why for name, why in _REFUSED.items() if flags.get(name, np.zeros(1)).any()]:
        return Part({}, facts, refused, {}, {}, set(), set(), notes)
    errors = {p: float(v["rule_error"]) for p, v in values.items() if "rule_error" in v}
    misdescribed, lost = _misdescribed(errors), _lost(looked, values)
    layers = {
        path: LayerPart(seen, values[path], _dots(products, seen, facts.gradient_scale))
        for path, seen in looked.items()
        if path not in misdescribed and path not in lost
    }
    for layer in layers.values():
        layer.looked.terms = _terms(layer)
    return Part(
        layers=layers,
        facts=facts,
        refused=[],
        unsupported={**unreached, **lost, **misdescribed},
        misdescribed=misdescribed,
        rows_lost={*misdescribed, *lost},
        checked={path for path, error in errors.items() if error <= RULE_TOLERANCE},
        notes=notes,
        loss_change=float(flags["loss_change"]) if "loss_change" in flags else None,
        loss_changes=tuple(flags.get("loss_changes", np.empty(0)).tolist()),
    )


def learn(watch: Watch, part: Part) -> None:
    """Let the coming steps know what this one was seen to do."""
    watch.idle |= {path for path, layer in part.layers.items() if _has_idle_rows(layer)}
    if part.facts.updated and part.layers:
        watch.seen |= part.layers.keys() | part.unsupported.keys()
        watch.learn(
            gradient_changed=part.facts.gradient_changed,
            weights_changed=part.facts.weights_changed,
        )


def _has_idle_rows(layer: LayerPart) -> bool:
    if "active" in layer.values:
        return float(layer.values["active"].sum()) < layer.looked.rows_total
    return bool((layer.values["products"][:, 0, 0] == 0).any())


def _facts(
    flags: Mapping[str, Array], products: Mapping[str, Mapping[int, Array]], keeps_gradient: bool
) -> Facts:
    updated, has_applied = "w_w" in products, "a_w" in products  # no updates without an optimizer
    changed = bool(flags.get("gradient_changed", np.zeros(1)).any())
    return Facts(
        updated=updated,
        gradient_scale=float(flags["gradient_scale"]) if "gradient_scale" in flags else 1.0,
        gradient_changed=changed,
        gradient_lost=changed and not keeps_gradient,
        has_applied=has_applied,
        weights_changed=updated and _applied_differs(products, has_applied),
    )


def _applied_differs(products: Mapping[str, Mapping[int, Array]], has_applied: bool) -> bool:
    # Taken in the same way they are equal to the last bit, unless θ has changed.
    names = ("w_w", "a_a") if has_applied else (STEPPED, APPLIED)
    before, after = (products[name] for name in names)
    # A layer that failed to be measured has no part in the first of them.
    return not all(_alike(before[key], a) for key, a in after.items() if key in before)


def _alike(a: Array, b: Array) -> bool:
    """Equal to the last bit, NaN to NaN, which takes long to compare."""
    return np.array_equal(a, b) or np.array_equal(a, b, equal_nan=True)


def _dots(
    products: Mapping[str, Mapping[int, Array]], seen: Looked, gradient_scale: float
) -> dict[str, float]:
    return {
        name: sum(seen.shares.get(key, 1.0) * float(parts[key].sum()) for key in seen.pieces)
        / gradient_scale ** name.count("gamma")
        for name, parts in products.items()
        if name not in (STEPPED, APPLIED)
    }


@np.errstate(all="ignore")  # what is not finite has no rounding to speak of
def _terms(layer: LayerPart) -> float:
    """See `Looked.terms`. ‖g_r φ_rᵀ‖² = (D G)_r·g_r, D the scales."""
    seen, values = layer.looked, layer.values
    place = {name: i for i, name in enumerate(seen.vectors)}
    products = values["products"]
    squares = products[:, place["G"], place["G"]]
    if "own" in place:
        squares = products[:, place["own"], place["G"]]
    elif "scale" in values:
        squares = squares * values["scale"]
    else:  # ‖J_r‖ ≥ ‖J_r γ‖ / ‖γ‖, where a row is linear in the parameters by its Jacobian J_r
        gamma_gamma = layer.dots["gamma_gamma"] or 1.0
        squares = squares * products[:, place["e"], place["e"]] / gamma_gamma
    factor = float(values.get("gradient_factor", 1.0))
    length = np.sqrt(np.maximum(squares, 0.0)).sum() / (factor or 1.0)
    return float(length * seen.rows_total / max(seen.rows_seen, 1))


def _misdescribed(errors: Mapping[str, float]) -> dict[str, str]:
    return {
        path: f"its output is not what its rule says (relative error {error:.2g}): a hook "
        "or a subclass changes it, or the registered rule is wrong"
        for path, error in errors.items()
        if error > RULE_TOLERANCE
    }


def _lost(
    looked: Mapping[str, Looked], values: Mapping[str, Mapping[str, Array]]
) -> dict[str, str]:
    return {
        path: f"a replay of its call does not give what the call gave (relative error {error:.2g}),"
        " so its rows are not known"
        for path, v in values.items()
        if (error := float(v.get("replay_error", 0.0))) > 10 * looked[path].tolerance
    }
