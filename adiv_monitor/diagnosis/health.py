"""What measures are called, how they are read, and their values in healthy networks."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from adiv_monitor.diagnosis.readings import gradients
from adiv_monitor.diagnosis.record import Record
from adiv_monitor.report import NO_MAPS, SIZES, WORST, StepReport, smallest

# Not a measure of the monitor, but computed from two: ‖∂L/∂z‖ of a layer over that of the last.
GRADIENT = "gradient"


class Measure(NamedTuple):
    """How a measure is called, read and coloured.

    Attributes:
        title: the measure in plain words.
        reads: its formula, and how to read it.
        knots: (value, level), values rising: level −1 is far too little, −0.5 to 0.5 the range of
            healthy layers, 1 far too much; levels between knots are interpolated. Empty: the
            healthy range is unknown, and colours only distinguish layers.
        logarithmic: whether values are compared by their ratios.
        of_maps: whether only layers that map features to features have the measure, or are
            comparable by it.
    """

    title: str
    reads: str
    knots: tuple[tuple[float, float], ...] = ()
    logarithmic: bool = False
    of_maps: bool = False

    @property
    def healthy(self) -> tuple[float, float]:
        """The smallest and the largest value that is drawn as healthy."""
        inside = [value for value, level in self.knots if abs(level) <= 0.5]
        return min(inside), max(inside)

    @property
    def far(self) -> tuple[float, float]:
        """The values at which the colours are full: far too little, and far too much."""
        return self.knots[0][0], self.knots[-1][0]

    def level(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return levels of values between far too little (−1) and far too much (1); NaN stays."""
        at, levels = np.asarray(self.knots).T
        if self.logarithmic:
            least = at[0] * 1e-6
            at, values = np.log(at), np.log(np.maximum(values, least))
        return np.asarray(np.interp(values, at, levels), dtype=np.float64)


# The measures that pictures draw, in this order; the first ones reveal most of 152 planted faults.
# Inner knots are the ends of the typical range in layers of 30 healthy runs, rounded (see
# tests/benchmarks/results/separation.md), or the limits of the audit's rules.
HEALTH: Mapping[str, Measure] = {
    "update_ratio": Measure("Move of the activations",
        "‖Δz‖ / ‖z‖. Healthy layers read 0.009 to 0.7. Blue: hardly moves; red: jumps.",
        ((3e-4, -1), (0.009, -0.5), (0.7, 0.5), (10, 1)), logarithmic=True, of_maps=True),
    GRADIENT: Measure("Gradient that arrives",
        "‖∂L/∂z‖ over the last layer's. Blue, below 0.03: vanishes; red, above 70: explodes.",
        ((1e-3, -1), (0.03, -0.5), (70, 0.5), (1000, 1)), logarithmic=True, of_maps=True),
    "idle_share": Measure("Zero-gradient rows",
        "Share of rows with g_r = 0: padding, masked tokens, dead units. Healthy: below 0.15.",
        ((0, 0), (0.15, 0.5), (1, 1))),
    "descent": Measure("Descent",
        "−⟨∂L/∂Θ, ΔΘ⟩: how far this layer lowers the loss, to first order. Dark: hardly, or not."),
    "update_cosine": Measure("Cosine of the step",
        "cos(d, G): 1 where activations moved straight downhill; dark: least."),
    "effective_lr": Measure("Effective learning rate",
        "⟨d, G⟩ / ‖G‖²: how fast activations go downhill; best alike in all layers.", of_maps=True),
    "scale_mean": Measure("Row scale, mean",
        "Mean of ‖φ‖² = ‖x‖² + 1: long rows make long steps.", of_maps=True),
    "scale_cv": Measure("Spread of the row scales",
        "std / mean of ‖φ‖². Healthy: below 0.8. Red: a few long rows set the step.",
        ((0, 0), (0.8, 0.5), (2, 1))),
    "projection_cosine": Measure("Cosine of the projection",
        "cos(a, u): 1 where nothing changed the weights after the step. Blue: something turned it.",
        ((0, -1), (0.98, -0.5), (1, 0))),
}  # fmt: skip
# Measures side by side in the overview.
OVERVIEW = ("update_ratio", GRADIENT, "idle_share", "update_cosine")


def value_of(record: "Record", report: StepReport, measure: str) -> dict[str, float]:
    """Return layer → value at a step, in the network's order; NaN: no direction."""
    if measure == GRADIENT:
        norms = gradients(record, report)
        last = next(reversed(norms.values()), 0.0)
        return {path: norm / last for path, norm in norms.items()} if last > 0 else {}
    return _values(report, measure)


def _values(report: StepReport, measure: str) -> dict[str, float]:
    of_maps = measure in HEALTH and HEALTH[measure].of_maps
    return {
        path: value
        for path, reading in report.readings(measure).items()
        if (value := getattr(reading, measure)) is not None
        and not (of_maps and report.layers[path].kind in NO_MAPS)
    }


def worst_layers(report: StepReport) -> dict[str, tuple[str, ...]]:
    """Return measure → its worst layer, if standard errors tell which one it is.

    Both ends of `update_ratio` are bad outside its healthy range. The layer with the smallest, and
    the one with the largest value is among the worst if it lies outside by two standard errors.
    """
    ends = report.summary()
    worst: dict[str, tuple[str, ...]] = {
        measure: (path,)
        for measure, bad in WORST.items()
        if measure in ends and ends[measure].min_layers != ends[measure].max_layers  # of several
        and (path := ends[measure].min_layer if bad == "min" else ends[measure].max_layer)
    }  # fmt: skip
    moves = {p: x for p, x in _values(report, "update_ratio").items() if not math.isnan(x)}
    errors = {p: report.layers[p].standard_error.get("update_ratio", 0.0) for p in moves}
    low, high = HEALTH["update_ratio"].healthy
    for sign, limit in ((1, low), (-1, -high)) if len(moves) > 1 else ():
        end = smallest((sign * move, errors[path], path) for path, move in moves.items())
        if len(end.layers) == 1 and end.value + 2 * errors[end.layers[0]] < limit:
            worst["update_ratio"] = (*worst.get("update_ratio", ()), *end.layers)
    return worst


def is_told(measure: str, values: NDArray[np.float64]) -> bool:
    """Return whether a picture of these values is informative: not all are equal or ideal."""
    if measure == "projection_cosine":
        return bool((values < 1 - 1e-3).any())
    is_known = np.isfinite(values).any()
    return bool(is_known and not math.isclose(np.nanmin(values), np.nanmax(values)))


_OTHERS = {**SIZES,  # title, and formula with how to read it
    "gradient_cosine": ("Cosine of a plain gradient step", "cos(e, G): the step without optimizer"),
    "diagonal_cosine": ("Cosine with the scales alone", "cos(D G, G): 1 if rows are equally long"),
    "attainable_cosine": ("Ceiling of the cosine", "‖P G‖ / ‖G‖: the most that any step can reach"),
    "interference_ratio": ("Interference", "‖e − D G‖ / ‖D G‖: a row's move by others, to its own"),
    "common_share": ("Share of the mean feature", "‖mean φ‖² / mean ‖φ‖²: 0 if inputs are centred"),
    "harmed_fraction": ("Harmed rows", "share of rows with d_r·g_r < 0: their own loss rises"),
    "bias_share": ("Share of the bias", "‖B‖ / (‖A‖ + ‖B‖): the bias's part of the update"),
    "parameter_cosine": ("Cosine of the parameters' step", "cos(u, −γ): of update and gradient"),
    "applied_cosine": ("Cosine of the applied change", "cos(a, −γ): of what remains and gradient"),
    "realised_cosine": ("Realised cosine", "cos(r, G): the actual change, with all layers moved"),
    "single_layer_share": ("Share of the layer's own step", "cos(r, d): of the actual change"),
    "first_order_error": ("Error of the first order", "‖Δz − JΔθ‖ / ‖Δz‖: 0 where it is linear"),
    "scale_max": ("Row scale, largest", "largest ‖φ‖² of the rows"),
    "row_cosine_mean": ("Cosine of rows, mean", "mean of cos(d_r, g_r)"),
    "attention_cosine": ("Cosine of the scores", "cos(−ΔY, G) of the attention scores"),
    "attention_gradient_cosine": ("Cosine of the scores, plain gradient step", "without optimizer"),
    "attention_scale_mean": ("Attention scale, mean", "mean of ‖∂Y/∂Θ‖²"),
    "attention_scale_cv": ("Spread of the attention scales", "std / mean of ‖∂Y/∂Θ‖²"),
    "attention_logit_max": ("Largest logit", "max Y·scale: softmax saturates far above 0"),
    "attention_logit_step": ("Step at the largest logit", "largest logit × last digit of q, k"),
    "attention_query_norm": ("Norm of queries", "largest ‖q‖"),
    "attention_key_norm": ("Norm of keys", "largest ‖k‖"),
    "attention_entropy": ("Entropy of attention", "1: all keys alike; 0: a single one"),
    "attention_first_share": ("Attention on the first key", "mean of P_t1"),
    "alpha": ("α, update on old features", "log_n of RMS(dW z₀) / (RMS(dW) RMS(z₀))"),
    "omega": ("ω, old weights on the change", "log_n of RMS(W₀ dz) / (RMS(W₀) RMS(dz))"),
    "u": ("u, update on the change", "log_n of RMS(dW dz) / (RMS(dW) RMS(dz))"),
    "cumulative": ("Alignment of W and z", "log_n of RMS(W z) / (RMS(W) RMS(z))"),
    "effective_rank": ("Effective rank", "directions over which weights and inputs spread alike"),
    "output_rms": ("RMS of W z", "rms of the outputs without the bias"),
    "output_change_rms": ("RMS of the change of W z", "rms of W z − W₀ z₀"),
    **{
        f"{of}_{place}": (f"{words}, {nth} percentile", "over the rows")
        for of, words in (("scale", "Row scale"), ("row_cosine", "Cosine of rows"))
        for place, nth in (("p05", "5th"), ("p50", "50th"), ("p95", "95th"))
    },
    **{
        f"{of}_{name}": (f"{title} {letter}", reads.format(letter))
        for of, title, reads in (
            ("kappa", "κ of", "n^({} − 1): the share of full alignment"),
            ("spectral", "Spectral", "with spectral norms of matrices"),
        )
        for name, letter in (("alpha", "α"), ("omega", "ω"), ("u", "u"), ("cumulative", "A"))
    },
    "row_cosine_p50": ("Cosine of the median row", "median of cos(d_r, g_r): how one sample fares"),
}  # fmt: skip
MEASURE_TITLES: Mapping[str, Measure] = {
    **HEALTH,
    **{name: Measure(title, f"{reads}.") for name, (title, reads) in _OTHERS.items()},
}


def measure_title(measure: str) -> str:
    """Return the title of a measure, or of another recorded number."""
    known = MEASURE_TITLES.get(measure)
    return sentence(measure) if known is None else known.title


def chart_text(tag: str) -> str:
    """Return the description of a scalar's chart by its tag; "" if none is known.

    >>> chart_text("adiv.summary/update_ratio_min").partition(".")[0]
    'Move of the activations: ‖Δz‖ / ‖z‖'
    """
    group, _, name = tag.partition("/")
    measure = group.removeprefix("adiv.")
    if measure.partition(".")[0] in ("summary", "sizes"):
        measure = name.rpartition("_")[0]
    known = HEALTH.get(measure)
    return f"{known.title}: {known.reads}" if known else ""


def fix_title(fix: str) -> str:
    """Return the title of a fix."""
    if fix.endswith("-like"):  # names of maps are kept
        return fix
    return fix.replace("rate*", "learning rate × ").replace("-", " ")


def sentence(name: str) -> str:
    """Return a name as the beginning of a sentence: "rate-too-low" as "Rate too low"."""
    words = name.replace("_", " ").replace("-", " ").strip()
    return words[:1].upper() + words[1:]
