"""A report as flat scalars: what dashboards and loggers take."""

from collections.abc import Iterable, Mapping

from adiv_monitor.report import (
    ALIGNMENT_MEASURES,
    ATTENTION_MEASURES,
    MEASURES,
    REALISED_MEASURES,
    StepReport,
)

# What is shown per layer unless the user chooses: twelve scalars, one per question; and where the
# monitor was asked for them, the ceiling, what really happened, and those of attention and of
# alignment.
DEFAULT_MEASURES: tuple[str, ...] = (
    "update_cosine",
    "gradient_cosine",
    "diagonal_cosine",
    "effective_lr",
    "scale_mean",
    "scale_cv",
    "interference_ratio",
    "row_cosine_p50",
    "harmed_fraction",
    "update_ratio",
    "parameter_cosine",
    "projection_cosine",
    "attainable_cosine",
    *REALISED_MEASURES,
    *ATTENTION_MEASURES,
    *ALIGNMENT_MEASURES,
)

# Option of the monitor → the measures that it is for.
_OPTIONAL: Mapping[str, tuple[str, ...]] = {
    "attainable": ("attainable_cosine",),
    "realised": REALISED_MEASURES,
    "attention": ATTENTION_MEASURES,
    "alignment": ALIGNMENT_MEASURES,
}


def known_measures(measures: Iterable[str]) -> tuple[str, ...]:
    """The measures as a tuple, in the given order.

    Raises:
        ValueError: when there is no measure of that name.
    """
    names = (measures,) if isinstance(measures, str) else tuple(measures)
    known = (*MEASURES, *ATTENTION_MEASURES, *ALIGNMENT_MEASURES)
    if unknown := [name for name in names if name not in known]:
        raise ValueError(
            f"measures={names}: there is no measure {', '.join(map(repr, unknown))}. "
            f"Choose from {', '.join(known)}."
        )
    return names


def taken(report: StepReport, measures: Iterable[str]) -> tuple[str, ...]:
    """Those of the measures that some layer of the report has, be it as NaN."""
    return tuple(
        measure
        for measure in measures
        if any(
            getattr(reading, measure) is not None for reading in report.readings(measure).values()
        )
    )


def asked_for(measures: Iterable[str], options: Mapping[str, object]) -> tuple[str, ...]:
    """Those of the measures that a monitor with these options may take."""
    absent = {
        measure
        for option, extra in _OPTIONAL.items()
        if options.get(option, False) is False or options[option] is None
        for measure in extra
    }
    return tuple(measure for measure in measures if measure not in absent)


def layer_scalars(report: StepReport, measures: Iterable[str]) -> dict[str, float]:
    """`adiv.<measure>/<module path>` → value, for the measures that were taken.

    Dashboards group by what precedes the first slash: the layers lie side by side in each measure.
    """
    return {
        f"adiv.{measure}/{path}": value
        for measure in measures
        for path, reading in report.readings(measure).items()
        if (value := getattr(reading, measure)) is not None
    }


def summary_scalars(
    report: StepReport, measures: Iterable[str], name: str = ""
) -> dict[str, float]:
    """`adiv.summary/<measure>_min`, `…_median` and `…_max` → value over the layers (NaN left out).

    And where it is known, `adiv.summary/realised_loss_change` beside `adiv.summary/descent`.

    Args:
        report: what is summarised.
        measures: which measures.
        name: tells several monitors of one run apart: the tags become `adiv.summary.<name>/…`.
    """
    summary = report.summary()
    scalars = {
        tag: getattr(summary[measure], end)
        for measure in measures
        if measure in summary
        for end, tag in summary_tags(measure, name).items()
    }
    if report.realised_loss_change is not None and report.descent is not None:
        scalars[f"{_group(name)}/realised_loss_change"] = report.realised_loss_change
        scalars[f"{_group(name)}/descent"] = report.descent
    return scalars


def summary_tags(measure: str, name: str = "") -> dict[str, str]:
    """min, median and max → the tag that this end of the measure has in `summary_scalars`."""
    return {end: f"{_group(name)}/{measure}_{end}" for end in ("min", "median", "max")}


def _group(name: str) -> str:
    return f"adiv.summary.{name}" if name else "adiv.summary"
