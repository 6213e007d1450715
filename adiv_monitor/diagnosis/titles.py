"""Titles and explanations of measures and findings for readers."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from adiv_monitor.diagnosis.faults import FAULTS
from adiv_monitor.diagnosis.health import GRADIENT, HEALTH


class Title(NamedTuple):
    """A measure in plain words.

    Attributes:
        title: short title.
        reads: formula and how to read it, in one line.
    """

    title: str
    reads: str


MEASURE_TITLES: Mapping[str, Title] = MappingProxyType(
    {
        "update_cosine": Title(
            "Cosine of the step", "cos(d, G): 1 where the step moved the activations downhill"
        ),
        "gradient_cosine": Title(
            "Cosine of a plain gradient step",
            "cos(e, G): the optimizer makes the difference to the step's own cosine",
        ),
        "diagonal_cosine": Title(
            "Cosine with the scales alone",
            "cos(D G, G): below 1 only because rows have different lengths",
        ),
        "attainable_cosine": Title(
            "Ceiling of the cosine", "‖P G‖ / ‖G‖: the most that any step of this layer could reach"
        ),
        "interference_ratio": Title(
            "Interference",
            "‖e − D G‖ / ‖D G‖: a row's move by the other rows, over its move by itself",
        ),
        "scale_cv": Title(
            "Spread of the row scales", "standard deviation / mean of ‖φ‖² over the rows"
        ),
        "scale_mean": Title("Row scale, mean", "mean of ‖φ‖² = ‖x‖² + 1 over the rows"),
        "common_share": Title(
            "Share of the mean feature",
            "‖mean φ‖² / mean ‖φ‖²: the share that centred inputs would remove",
        ),
        "effective_lr": Title(
            "Effective learning rate",
            "⟨d, G⟩ / ‖G‖²: the learning rate at which the activations actually move downhill",
        ),
        "update_ratio": Title(
            "Move of the activations", "‖Δz‖ / ‖z‖: how far the activations move in one step"
        ),
        GRADIENT: Title(
            "Gradient that arrives", "‖∂L/∂z‖ of the layer over that of the last layer"
        ),
        "row_cosine_p50": Title(
            "Cosine of the median row", "median of cos(d_r, g_r): how a single sample fares"
        ),
        "harmed_fraction": Title(
            "Harmed rows", "share of rows with d_r·g_r < 0: the step raises their own loss"
        ),
        "idle_share": Title(
            "Zero-gradient rows", "share of rows with g_r = 0: padding, masked tokens, dead units"
        ),
        "bias_share": Title(
            "Share of the bias", "‖B‖ / (‖A‖ + ‖B‖): the bias's part of the update"
        ),
        "descent": Title("Descent", "−⟨∂L/∂Θ, ΔΘ⟩: first-order decrease of the loss by this layer"),
        "parameter_cosine": Title(
            "Cosine of the parameters' step",
            "cos(u, −γ): the optimizer's update against the gradient that it saw",
        ),
        "projection_cosine": Title(
            "Cosine of the projection",
            "cos(a, u): the change that remains after the step against the optimizer's update",
        ),
        "applied_cosine": Title(
            "Cosine of the applied change",
            "cos(a, −γ): the change that remains against the gradient",
        ),
        "realised_cosine": Title(
            "Realised cosine",
            "cos(r, G): the actual change of the activations, with all layers moved",
        ),
        "single_layer_share": Title(
            "Share of the layer's own step",
            "cos(r, d): how much of the actual change is due to the layer's own step",
        ),
        "first_order_error": Title(
            "Error of the first order", "‖Δz − JΔθ‖ / ‖Δz‖: how far the move is from linear"
        ),
        "scale_max": Title("Row scale, largest", "largest ‖φ‖² of the rows"),
        "scale_p05": Title("Row scale, 5th percentile", "of ‖φ‖² over the rows"),
        "scale_p50": Title("Row scale, median", "of ‖φ‖² over the rows"),
        "scale_p95": Title("Row scale, 95th percentile", "of ‖φ‖² over the rows"),
        "row_cosine_mean": Title("Cosine of rows, mean", "mean of cos(d_r, g_r)"),
        "row_cosine_p05": Title("Cosine of rows, 5th percentile", "of cos(d_r, g_r)"),
        "row_cosine_p95": Title("Cosine of rows, 95th percentile", "of cos(d_r, g_r)"),
        "attention_cosine": Title("Cosine of the scores", "cos(−ΔY, G) of the attention scores"),
        "attention_gradient_cosine": Title(
            "Cosine of the scores, plain gradient step",
            "the cosine of the scores under a plain gradient step",
        ),
        "attention_scale_mean": Title("Attention scale, mean", "mean of ‖∂Y/∂Θ‖²"),
        "attention_scale_cv": Title(
            "Spread of the attention scales", "standard deviation / mean of ‖∂Y/∂Θ‖²"
        ),
        "alpha": Title("α, update on old features", "log_n of RMS(dW z₀) / (RMS(dW) RMS(z₀))"),
        "omega": Title("ω, old weights on the change", "log_n of RMS(W₀ dz) / (RMS(W₀) RMS(dz))"),
        "u": Title("u, update on the change", "log_n of RMS(dW dz) / (RMS(dW) RMS(dz))"),
        "cumulative": Title("Alignment of W and z", "log_n of RMS(W z) / (RMS(W) RMS(z))"),
        "kappa_alpha": Title("κ of α", "n^(α − 1): the share of full alignment"),
        "kappa_omega": Title("κ of ω", "n^(ω − 1)"),
        "kappa_u": Title("κ of u", "n^(u − 1)"),
        "kappa_cumulative": Title("κ of the alignment of W and z", "n^(A − 1)"),
        "spectral_alpha": Title("Spectral α", "‖dW z₀‖ / (‖dW‖₂ ‖z₀‖)"),
        "spectral_omega": Title("Spectral ω", "‖W₀ dz‖ / (‖W₀‖₂ ‖dz‖)"),
        "spectral_u": Title("Spectral u", "‖dW dz‖ / (‖dW‖₂ ‖dz‖)"),
        "spectral_cumulative": Title("Spectral alignment of W and z", "‖W z‖ / (‖W‖₂ ‖z‖)"),
        "effective_rank": Title(
            "Effective rank",
            "the number of directions over which weights and inputs are spread alike",
        ),
        "output_rms": Title("RMS of W z", "rms of the outputs without the bias"),
        "output_change_rms": Title("RMS of the change of W z", "rms of W z − W₀ z₀"),
    }
)

# Titles of narrow columns.
SHORT_TITLES: Mapping[str, str] = MappingProxyType(
    {
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
)


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
