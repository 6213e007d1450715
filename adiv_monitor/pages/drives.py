"""The causes that lower the cosine, in words, with the loss of cosine by each."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from adiv_monitor.pages.chain import CHAIN, MeanPart, Part, mean_chain, mean_projection
from adiv_monitor.pages.multiples import Block, bar
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
    "projection": (
        "parameter cosine − applied cosine",
        "Code changes the weights after the optimizer's step. This cause is measured in "
        "parameters, the others in activations.",
    ),
}


@dataclass(frozen=True)
class Drive:
    """One cause in words; `taken` and `worst` are None if it was not measured."""

    cause: str
    formula: str
    means: str
    taken: str | None
    worst: str | None
    worst_layer: str


@dataclass(frozen=True)
class Drives:
    """All causes at one step.

    Attributes:
        step: the measured step.
        layers: number of layers that the means are over.
        of: number of all layers.
        sentence: the causes with the largest losses, in words.
        bar: the means, as a bar.
        lowest: lower end of the bar's axis.
        causes: the causes one by one.
    """

    step: int
    layers: int
    of: int
    sentence: str
    bar: tuple[Block, ...]
    lowest: float
    causes: tuple[Drive, ...]


def drives(report: StepReport) -> Drives | None:
    """Return the causes at a step; None if no layer has them separately."""
    parts, layers = mean_chain(report.layers)
    if not parts:
        return None
    by_cause = {part.cause: part for part in parts}
    if projection := mean_projection(report.layers):
        by_cause["projection"] = projection
    links = _links(parts)
    kept = links[-1].after
    lowest = min(0.0, kept)
    return Drives(
        step=report.step,
        layers=layers,
        of=len(report.layers),
        sentence=_sentence(parts, kept, report.layers),
        bar=bar(links, lowest),
        lowest=lowest,
        causes=tuple(_drive(cause, by_cause.get(cause)) for cause in (*CHAIN, "projection")),
    )


def _links(parts: tuple[MeanPart, ...]) -> tuple[Part, ...]:
    """Return the means as a chain that starts at 1."""
    links: list[Part] = []
    before = 1.0
    for part in parts:
        links.append(Part((part.cause,), before, before - part.taken, part.error))
        before -= part.taken
    return tuple(links)


def _drive(cause: str, part: MeanPart | None) -> Drive:
    formula, means = _CAUSES[cause]
    if part is None:
        return Drive(cause, formula, means, None, None, "")
    return Drive(
        cause,
        formula,
        means,
        number(part.taken, part.error),
        number(part.worst_taken, part.worst_error),
        part.worst,
    )


def _sentence(
    parts: tuple[MeanPart, ...], kept: float, readings: Mapping[str, LayerReading]
) -> str:
    clear = [part for part in parts if abs(part.taken) > 2 * part.error and abs(part.taken) >= 5e-3]
    clear.sort(key=lambda part: -part.taken)
    lowering = [
        f"{'the ' * (p.cause == 'optimizer')}{p.cause} lowers it by {number(p.taken, p.error)}"
        for p in clear
        if p.taken > 0
    ]
    raising = [
        f"{'the ' * (p.cause == 'optimizer')}{p.cause} raises it by {number(-p.taken, p.error)}"
        for p in clear
        if p.taken < 0
    ]
    causes = ", ".join([*lowering, *raising]) or "no cause lowers it by more than its error"
    words = f"Of a cosine of 1, the mean layer's step keeps {number(kept)}: {causes}."
    several = (reading.attainable_cosine for reading in readings.values())
    ceilings = [c for c in several if c is not None and math.isfinite(c)]
    if ceilings:
        ceiling = sum(ceilings) / len(ceilings)
        words += f" No step of these layers could keep more than {number(ceiling)} in the mean."
    return words
