"""Titles and explanations of measures and findings for readers."""

from collections.abc import Mapping
from typing import NamedTuple

from adiv_monitor.diagnosis.faults import FAULTS
from adiv_monitor.diagnosis.health import GRADIENT, HEALTH


class Title(NamedTuple):
    """A measure in plain words: a short title, and its formula with how to read it."""

    title: str
    reads: str


_MEASURES = {  # title, and formula with how to read it
    "update_cosine": ("Cosine of the step", "cos(d, G): 1 where the step moved them downhill"),
    "gradient_cosine": ("Cosine of a plain gradient step", "cos(e, G): the step without optimizer"),
    "diagonal_cosine": ("Cosine with the scales alone", "cos(D G, G): 1 if rows are equally long"),
    "attainable_cosine": ("Ceiling of the cosine", "‖P G‖ / ‖G‖: the most that any step can reach"),
    "interference_ratio": ("Interference", "‖e − D G‖ / ‖D G‖: a row's move by others, to its own"),
    "scale_cv": ("Spread of the row scales", "standard deviation / mean of ‖φ‖² over the rows"),
    "scale_mean": ("Row scale, mean", "mean of ‖φ‖² = ‖x‖² + 1 over the rows"),
    "common_share": ("Share of the mean feature", "‖mean φ‖² / mean ‖φ‖²: 0 if inputs are centred"),
    "effective_lr": ("Effective learning rate", "⟨d, G⟩ / ‖G‖²: how fast activations go downhill"),
    "update_ratio": ("Move of the activations", "‖Δz‖ / ‖z‖: how far they move in one step"),
    GRADIENT: ("Gradient that arrives", "‖∂L/∂z‖ of the layer over that of the last layer"),
    "harmed_fraction": ("Harmed rows", "share of rows with d_r·g_r < 0: their own loss rises"),
    "idle_share": ("Zero-gradient rows", "share of rows with g_r = 0: padding, masks, dead units"),
    "bias_share": ("Share of the bias", "‖B‖ / (‖A‖ + ‖B‖): the bias's part of the update"),
    "descent": ("Descent", "−⟨∂L/∂Θ, ΔΘ⟩: first-order decrease of the loss by this layer"),
    "parameter_cosine": ("Cosine of the parameters' step", "cos(u, −γ): of update and gradient"),
    "projection_cosine": ("Cosine of the projection", "cos(a, u): what remains of the update"),
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
        f"kappa_{name}": (f"κ of {letter}", f"n^({letter} − 1): the share of full alignment")
        for name, letter in (("alpha", "α"), ("omega", "ω"), ("u", "u"), ("cumulative", "A"))
    },
    **{
        f"spectral_{name}": (f"Spectral {letter}", "with spectral norms of matrices")
        for name, letter in (("alpha", "α"), ("omega", "ω"), ("u", "u"), ("cumulative", "A"))
    },
    "row_cosine_p50": ("Cosine of the median row", "median of cos(d_r, g_r): how one sample fares"),
}
MEASURE_TITLES: Mapping[str, Title] = {name: Title(*said) for name, said in _MEASURES.items()}

# Titles of narrow columns.
SHORT_TITLES: Mapping[str, str] = {
    "update_cosine": "Step’s cosine",
    "gradient_cosine": "Gradient’s cosine",
    "attainable_cosine": "Ceiling",
    "realised_cosine": "Realised cosine",
    "scale_cv": "Spread of scales",
    "common_share": "Mean feature",
    "interference_ratio": "Interference",
    "harmed_fraction": "Harmed rows",
    "effective_lr": "Effective lr",
    "update_ratio": "Move",
}


def measure_title(measure: str) -> str:
    """Return the title of a measure, or of another recorded number."""
    known = MEASURE_TITLES.get(measure)
    return _sentence(measure) if known is None else known.title


def how_to_read(measure: str) -> str:
    """Return how to read a measure in `MEASURE_TITLES`, with the healthy range if it is known."""
    known = HEALTH.get(measure)
    return f"{MEASURE_TITLES[measure].reads}." if known is None else known.reads


def chart_text(tag: str) -> str:
    """Return the description of a scalar's chart by its tag; "" if none is known.

    >>> chart_text("adiv.summary/update_ratio_min").partition(".")[0]
    'Move of the activations: ‖Δz‖ / ‖z‖'
    """
    group, _, name = tag.partition("/")
    measure = group.removeprefix("adiv.")
    if measure.partition(".")[0] == "summary":
        measure = name.rpartition("_")[0]
    return f"{measure_title(measure)}: {how_to_read(measure)}" if measure in HEALTH else ""


def finding_title(name: str) -> str:
    """Return the title of a finding."""
    return FAULTS[name].title if name in FAULTS else _sentence(name)


def fix_title(fix: str) -> str:
    """Return the title of a fix."""
    if fix.endswith("-like"):  # names of maps are kept
        return fix
    return fix.replace("rate*", "learning rate × ").replace("-", " ")


def _sentence(name: str) -> str:
    words = name.replace("_", " ").replace("-", " ").strip()
    return words[:1].upper() + words[1:]
