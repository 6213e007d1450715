"""The causes that lower the cosine, in words, with the loss of cosine by each."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from adiv_monitor.pages.chain import CHAIN, Part, bar, mean_chain
from adiv_monitor.report import LayerReading, StepReport
from adiv_monitor.report.wording import number

# Cause → formula, and its meaning.
_CAUSES: Mapping[str, tuple[str, str]] = {
    "scale": (
        "1 − diagonal cosine",
        "A step moves rows of different length by different amounts. Inputs or layers that make "
        "the rows alike fix this.",
    ),
    "interference": (
        "diagonal cosine − gradient cosine",
        "Rows share the weights, so the gradients of the other rows move each row too. No step of "
        "the layer can keep more than its ceiling.",
    ),
    "optimizer": (
        "gradient cosine − update cosine",
        "Momentum, scaling of single entries and decay turn the step away from the gradient.",
    ),
    "depth": (
        "update cosine − realised cosine",
        "The layers before this one have moved too, and so have its inputs. Code that changes the "
        "weights after the step also counts here.",
    ),
}


def drives(report: StepReport) -> dict[str, Any] | None:
    """Return the causes at a step, over the layers that have them separately; None without any.

    "sentence" names the causes with the largest losses; "causes" has of each its name, formula,
    meaning and mean loss in words, "" if it was not measured.
    """
    parts, layers = mean_chain(report.layers)
    if not parts:
        return None
    # Smaller differences are rounding.
    taken = {p.causes[0]: number(round(p.taken, 6), p.error) for p in parts}
    lowest = min(0.0, parts[-1].after)
    return {
        "step": report.step,
        "layers": layers,
        "of": len(report.layers),
        "sentence": _sentence(parts, report.layers),
        "bar": bar(parts, lowest),
        "lowest": lowest,
        "causes": [(cause, *_CAUSES[cause], taken.get(cause, "")) for cause in CHAIN],
    }


def _sentence(parts: Sequence[Part], readings: Mapping[str, LayerReading]) -> str:
    clear = [part for part in parts if abs(part.taken) > 2 * part.error and abs(part.taken) >= 5e-3]
    said = [
        f"{'the ' * (part.causes[0] == 'optimizer')}{part.causes[0]} "
        f"{'lowers' if part.taken > 0 else 'raises'} it by {number(abs(part.taken), part.error)}"
        for part in sorted(clear, key=lambda part: -part.taken)
    ]
    causes = ", ".join(said) or "no cause lowers it by more than its error"
    words = f"Of a cosine of 1, the mean layer's step keeps {number(parts[-1].after)}: {causes}."
    several = (reading.attainable_cosine for reading in readings.values())
    ceilings = [c for c in several if c is not None and math.isfinite(c)]
    if ceilings:
        ceiling = sum(ceilings) / len(ceilings)
        words += f" No step of these layers could keep more than {number(ceiling)} in the mean."
    return words
