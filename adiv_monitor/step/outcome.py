"""From numbers on the host to readings, and what a reader must know about them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from adiv_monitor.capture.selection import listed
from adiv_monitor.capture.updates import APPLIED, STEPPED, Watch
from adiv_monitor.features.rows import Index
from adiv_monitor.maths.readings import REALISED, Array, Measured, Numbers, measure
from adiv_monitor.report import MEASURES, AttentionReading, LayerReading

# A rule that does not describe its layer is wrong by much more than half precision's rounding.
_RULE_TOLERANCE = 0.05
# The cosine of two gradients that are alike but for a factor is 1 but for rounding.
_LIKENESS_TOLERANCE = 1e-3

_REFUSED = {
    "skipped": "The optimizer skipped the step, because a gradient is not finite: not measured.",
    "moved": (
        "The optimizer moved the weights before it asked for the gradient (as SAM does), so its "
        "update does not start where the gradient was taken: not measured."
    ),
}
# Why what the parameters say does not hold for the rows, so that all is estimated from rows.
_FROM_ROWS = {
    "shared": "The weights of {} are used by other layers too",
    "unknown": "The gradient of {} was set by hand, in units that are not known",
    "edited": "The gradient of {} was changed since the backward pass, by more than a factor",
    "more": (
        "The gradient of {} holds more than these rows (a penalty in the loss, a use outside the "
        "layer's forward, an edit by a hook?)"
    ),
}


@dataclass(frozen=True)
class Outcome:
    """What a measured step has to say.

    Attributes:
        layers: the readings.
        unsupported: path → why there is no reading of a layer that was watched.
        misdescribed: path → why a layer must not be watched again: its rule does not hold.
        checked: layers whose rule was seen to hold (an output of zeros shows nothing).
        notes: what else a reader must know.
        loss_change: how the loss really changed, and that of every sample, if that was measured.
        loss_changes: see loss_change.
        attention: the readings of attentions.
    """

    layers: dict[str, LayerReading]
    unsupported: dict[str, str]
    misdescribed: dict[str, str]
    checked: set[str]
    notes: list[str]
    loss_change: float | None = None
    loss_changes: tuple[float, ...] = ()
    attention: dict[str, AttentionReading] = field(default_factory=dict)


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
        groups: groups of the layer.
        precision: rounding of the coarsest number that a gradient went through.
        from_rows: why the parameters do not speak for the rows, if that is known beforehand.
        undefined: measures that such a layer does not have.
        vectors: names of the matrices whose row products were taken.
        entry_rows: see `Numbers`.
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


def refusals(flags: Mapping[str, Array]) -> list[str]:
    """Why the step can't be measured at all; empty if it can."""
    return [reason for name, reason in _REFUSED.items() if flags.get(name, np.zeros(1)).any()]


def understand(
    looked: Mapping[str, Looked],
    values: dict[str, dict[str, Array]],
    flags: Mapping[str, Array],
    products: Mapping[str, Mapping[int, Array]],
    *,
    unreached: Mapping[str, str],
    watch: Watch,
    keeps_gradient: bool,
) -> Outcome:
    """Readings, and what goes with them.

    Args:
        looked: path → what was looked at there.
        values: path → name → numbers.
        flags: name → what is so of the step as a whole.
        products: name → key of a piece → numbers that add up to a dot product.
        unreached: path → why there are no numbers.
        watch: is told what happened to gradients and weights.
        keeps_gradient: γ was copied, so that the optimizer could not change it.
    """
    if refused := refusals(flags):
        return Outcome({}, {}, {}, set(), refused)
    errors = {p: float(v["rule_error"]) for p, v in values.items() if "rule_error" in v}
    misdescribed, lost = _misdescribed(errors), _lost(looked, values)
    kept = {path: seen for path, seen in looked.items() if path not in {**misdescribed, **lost}}
    step = _Step(flags, products, keeps_gradient)
    numbers: dict[str, Numbers] = {}
    reasons: dict[str, str] = {}
    for path, seen in kept.items():
        suspected = path in watch.suspected
        numbers[path], reasons[path] = step.numbers(seen, values[path], suspected=suspected)
    measured = measure(numbers)
    reasons |= {path: "more" for path, found in measured.items() if found.holds_more}
    readings = {
        p: _reading(seen, numbers[p], measured[p], step, stretched=_is_stretched(values[p], seen))
        for p, seen in kept.items()
    }
    notes = [
        *_not_finite(numbers),
        *_from_rows(reasons),
        *step.notes(list(kept)),
        *_without_common(readings, kept, watch),
        *_rounded(numbers, kept),
    ]
    _learn(watch, step, readings, reasons)
    watch.suspected = {path for path, found in measured.items() if found.suspected}
    checked = {path for path, error in errors.items() if error <= _RULE_TOLERANCE}
    return Outcome(
        readings,
        {**unreached, **lost, **misdescribed},
        misdescribed,
        checked,
        notes,
        float(flags["loss_change"]) if "loss_change" in flags else None,
        tuple(flags.get("loss_changes", np.empty(0)).tolist()),
    )


def _misdescribed(errors: Mapping[str, float]) -> dict[str, str]:
    return {
        path: f"its output is not what its rule says (relative error {error:.2g}): a hook "
        "or a subclass changes it, or the registered rule is wrong"
        for path, error in errors.items()
        if error > _RULE_TOLERANCE
    }


def _lost(
    looked: Mapping[str, Looked], values: Mapping[str, Mapping[str, Array]]
) -> dict[str, str]:
    return {
        path: f"a replay of its call does not give what the call gave (relative error {error:.2g}),"
        " so its rows are not known"
        for path, v in values.items()
        if (error := float(v.get("replay_error", 0.0))) > 10 * _tolerance(looked[path])
    }


class _Step:
    """What is known of the step as a whole."""

    def __init__(
        self,
        flags: Mapping[str, Array],
        products: Mapping[str, Mapping[int, Array]],
        keeps_gradient: bool,
    ) -> None:
        self._products = products
        self.updated = "w_w" in products  # not without an optimizer
        self._scale = float(flags["gradient_scale"]) if "gradient_scale" in flags else 1.0
        self.gradient_changed = bool(flags.get("gradient_changed", np.zeros(1)).any())
        self.gradient_lost = self.gradient_changed and not keeps_gradient
        # Where a = u is expected there is only what proves it.
        self.has_applied = "a_w" in products
        self.weights_changed = self.updated and self._applied_differs()

    def _applied_differs(self) -> bool:
        # Taken in the same way they are equal to the last bit, unless θ has changed.
        names = ("w_w", "a_a") if self.has_applied else (STEPPED, APPLIED)
        before, after = (self._products[name] for name in names)
        # A layer that failed to be measured has no part in the first of them.
        return not all(_alike(before[key], a) for key, a in after.items() if key in before)

    def numbers(
        self, seen: Looked, values: dict[str, Array], *, suspected: bool
    ) -> tuple[Numbers, str]:
        """What the measures of one layer need; and why they must rest on its rows alone, if so."""
        dots = {
            name: sum(float(parts[key].sum()) for key in seen.pieces)
            / self._scale ** name.count("gamma")
            for name, parts in self._products.items()
            if name not in (STEPPED, APPLIED)
        }
        factor = float(values.get("gradient_factor", math.nan))
        reason = seen.from_rows or _speaks_against(values, dots["gamma_gamma"], factor, seen)
        found = Numbers(
            rows_seen=seen.rows_seen,
            rows_total=seen.rows_total,
            groups=seen.groups,
            vectors=seen.vectors,
            values={name: v for name, v in values.items() if name not in _JUDGED},
            exact=not reason and not self.gradient_lost,
            suspected=suspected,
            shared=seen.from_rows == "shared",
            bias_alone=seen.bias_alone,
            tolerance=_tolerance(seen),
            factor=factor,
            entry_rows=seen.entry_rows,
            dots=dots,
        )
        return found, reason

    def notes(self, paths: list[str]) -> list[str]:
        """What of this step was not foreseen, and is therefore missing."""
        notes = []
        if self.gradient_lost:
            notes.append(
                "The optimizer changed .grad during its step, unlike before: parameter_cosine, "
                f"applied_cosine and descent are missing for {listed(paths)}, from the next "
                "report on they are there."
            )
        if self.weights_changed and not self.has_applied:
            notes.append(
                "The weights changed after the optimizer's step, unlike before: projection_cosine "
                f"and applied_cosine are missing for {listed(paths)}, from the next report on "
                "they are there."
            )
        return notes


# What is looked at by `_speaks_against` and the like, and is no part of any measure.
_JUDGED = (
    *("gradient_factor", "rule_error", "replay_error", "then", "now", "foreign", "probe"),
    "stretch",
)


def _speaks_against(values: Mapping[str, Array], gamma: float, factor: float, seen: Looked) -> str:
    """Why γ is not c·GᵀΦ of these rows with a known c; "" if nothing is known against it."""
    if gamma == 0 or not math.isfinite(gamma):  # nothing was left to be in any units
        return ""
    if math.isnan(factor):
        return "unknown"
    if "then" in values and len(values["then"]) == len(values["now"]):
        then, now = (values[name] / (np.abs(values[name]).max() or 1) for name in ("then", "now"))
        lengths = float(np.linalg.norm(then) * np.linalg.norm(now))
        # Entries that are all zero tell nothing.
        if lengths > 0 and then @ now < (1 - _LIKENESS_TOLERANCE) * lengths:
            return "edited"
    # The gradient as a whole is ‖γ‖; what was there before the rows is in units of its own.
    held = float(values.get("foreign", 0.0))
    if held * factor > _tolerance(seen) * math.sqrt(gamma):
        return "more"
    if "probe" in values:
        difference, whole = np.linalg.norm(values["probe"], axis=1)
        if difference > 10 * _tolerance(seen) * whole:
            return "more"
    return ""


def _alike(a: Array, b: Array) -> bool:
    """Equal to the last bit, NaN to NaN, which takes long to compare."""
    return np.array_equal(a, b) or np.array_equal(a, b, equal_nan=True)


def _tolerance(seen: Looked) -> float:
    """How far rounding may take two sums apart that should be equal, relative to their terms."""
    # Matrix products of float32 may be taken with fewer digits (TensorFloat-32).
    return 1e-9 if seen.precision < 1e-15 else max(1e-3, 4 * seen.precision)


def _not_finite(numbers: Mapping[str, Numbers]) -> list[str]:
    paths = [
        path
        for path, found in numbers.items()
        if not np.isfinite(found.values["products"][:, 0, 0]).all()
    ]
    return [f"The gradient is not finite in {listed(paths)}."] if paths else []


def _from_rows(reasons: Mapping[str, str]) -> list[str]:
    """One sentence for each reason why readings rest on rows alone."""
    notes = []
    for reason, sentence in _FROM_ROWS.items():
        paths = [path for path, found in reasons.items() if found == reason]
        if paths:
            notes.append(sentence.format(listed(paths)) + ": estimated from their rows alone.")
    return notes


def _without_common(
    readings: Mapping[str, LayerReading], looked: Mapping[str, Looked], watch: Watch
) -> list[str]:
    paths = [
        path
        for path, reading in readings.items()
        if reading.idle_share and reading.common_share is None and not watch.expects_idle(path)
        if "common_share" not in looked[path].undefined
    ]
    if not paths:
        return []
    return [
        f"Idle rows, unlike before: common_share is missing for {listed(paths)}, from the next "
        "report on it is there."
    ]


def _rounded(numbers: Mapping[str, Numbers], looked: Mapping[str, Looked]) -> list[str]:
    paths = []
    for path, found in numbers.items():
        if "realised" in found.values:
            at, of_z = REALISED.index("r"), found.vectors.index("z")
            moved = math.sqrt(found.values["realised"][:, at, at].sum())
            length = math.sqrt(found.values["products"][:, of_z, of_z].sum())
            # The difference of two numbers of this precision is off by 0.3 of its last digit.
            if 0 < moved < looked[path].precision * length:
                paths.append(path)
    if not paths:
        return []
    return [
        f"What really happened to {listed(paths)} is hardly more than rounding: realised_cosine "
        "and single_layer_share are too near to 0 there, first_order_error is too large."
    ]


def _learn(
    watch: Watch, step: _Step, readings: Mapping[str, LayerReading], reasons: Mapping[str, str]
) -> None:
    watch.distrusted |= {path for path, reason in reasons.items() if reason}
    watch.idle |= {path for path, reading in readings.items() if reading.idle_share}
    if step.updated and readings:
        watch.learn(gradient_changed=step.gradient_changed, weights_changed=step.weights_changed)


def _is_stretched(values: Mapping[str, Array], seen: Looked) -> bool:
    """Whether a gradient changes its length on its way from the parameters to the weight.

    If so, e is no plain step of the weight itself, and what other rows do to a row can't be told
    from what it does to itself.
    """
    return bool((np.abs(values.get("stretch", np.ones(1)) - 1) > _tolerance(seen)).any())


def _reading(
    seen: Looked, numbers: Numbers, found: Measured, step: _Step, *, stretched: bool
) -> LayerReading:
    values = dict(found.values)
    if stretched:
        values.pop("interference_ratio", None)
    if found.common_unknown:
        values.pop("common_share", None)
    for name in seen.undefined:
        values.pop(name, None)
    if step.gradient_lost:  # what was read for γ is not what the optimizer saw
        for name in ("parameter_cosine", "applied_cosine", "descent"):
            values.pop(name, None)
    elif step.updated and not step.weights_changed and not step.has_applied:  # a = u
        values["projection_cosine"] = 1.0 if numbers.dots["w_w"] > 0 else math.nan
        values["applied_cosine"] = values["parameter_cosine"]
    return LayerReading(
        kind=seen.kind,
        rows_seen=seen.rows_seen,
        rows_total=seen.rows_total,
        rows_without_gradient=found.idle_seen,
        gradient_factor=numbers.factor if numbers.dots["gamma_gamma"] > 0 else math.nan,
        standard_error={name: error for name, error in found.errors.items() if name in values},
        scale_quantiles=found.quantiles.get("scale", ()),
        row_cosine_quantiles=found.quantiles.get("row_cosine", ()),
        **{name: value for name, value in values.items() if name in MEASURES},
    )
