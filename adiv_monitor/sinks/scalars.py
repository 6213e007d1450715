"""A report as flat scalars: what dashboards and loggers take."""

from collections.abc import Iterable

from adiv_monitor.report import ATTENTION_MEASURES, MEASURES, StepReport

# What is shown per layer unless the user chooses: twelve scalars, one per question, and the ceiling
# and those of attention where the monitor was asked for them.
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
    *ATTENTION_MEASURES,
)


def known_measures(measures: Iterable[str]) -> tuple[str, ...]:
    """The measures as a tuple, in the given order.

    Raises:
        ValueError: when there is no measure of that name.
    """
    names = (measures,) if isinstance(measures, str) else tuple(measures)
    known = (*MEASURES, *ATTENTION_MEASURES)
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


def asked_for(measures: Iterable[str], *, attainable: bool, attention: bool) -> tuple[str, ...]:
    """Those of the measures that a monitor with these options may take."""
    absent = () if attention else ATTENTION_MEASURES
    absent = absent if attainable else (*absent, "attainable_cosine")
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

    Args:
        report: what is summarised.
        measures: which measures.
        name: tells several monitors of one run apart: the tags become `adiv.summary.<name>/…`.
    """
    summary = report.summary()
    return {
        tag: getattr(summary[measure], end)
        for measure in measures
        if measure in summary
        for end, tag in summary_tags(measure, name).items()
    }


def summary_tags(measure: str, name: str = "") -> dict[str, str]:
    """min, median and max → the tag that this end of the measure has in `summary_scalars`."""
    group = f"adiv.summary.{name}" if name else "adiv.summary"
    return {end: f"{group}/{measure}_{end}" for end in ("min", "median", "max")}
