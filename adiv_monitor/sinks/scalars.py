"""A report as flat scalars, for dashboards and loggers."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Literal, get_args

from adiv_monitor.report import (
    ALIGNMENT_MEASURES,
    ATTENTION_MEASURES,
    MEASURES,
    NO_MAPS,
    REALISED_MEASURES,
    SIZES,
    StepReport,
)
from adiv_monitor.report.blocks import blocks

# "few": the summary over layers, and the main measures of each block; "all": also every layer.
Scalars = Literal["few", "all"]

# Default measures of a dashboard: those that best separate most planted faults from healthy runs
# (tests/benchmarks/results/separation.md), the step's cosine, and the optional measures.
FRONT_MEASURES: tuple[str, ...] = (
    *("update_ratio", "descent", "idle_share", "effective_lr", "scale_mean", "update_cosine"),
    *("activation_rms", "gradient_norm", "weight_update_ratio"),
    *("attainable_cosine", *REALISED_MEASURES, *ATTENTION_MEASURES, *ALIGNMENT_MEASURES),
)
BLOCK_MEASURES: tuple[str, ...] = ("update_ratio", "descent", "update_cosine")

# Default measures of each layer, which callbacks may monitor: one measure per question, and the
# optional measures: the ceiling, the realised ones, those of attention and of alignment.
DEFAULT_MEASURES: tuple[str, ...] = (
    *("update_cosine", "gradient_cosine", "diagonal_cosine", "effective_lr", "scale_mean"),
    *("scale_cv", "interference_ratio", "row_cosine_p50", "harmed_fraction", "update_ratio"),
    *("descent", "idle_share", "parameter_cosine", "projection_cosine", "attainable_cosine"),
    *("activation_rms", "gradient_norm", "weight_update_ratio", "unchanged_share"),
    *(*REALISED_MEASURES, *ATTENTION_MEASURES, *ALIGNMENT_MEASURES),
)

# Sizes of the whole gradient and update.
_WHOLE = ("gradient_norm", "unclipped_gradient_norm", "update_norm", "clipped_share")

# Option of the monitor → the measures that it enables.
_OPTIONAL: Mapping[str, tuple[str, ...]] = {
    "attainable": ("attainable_cosine",),
    "realised": REALISED_MEASURES,
    "attention": ATTENTION_MEASURES,
    "alignment": ALIGNMENT_MEASURES,
}


@dataclass(frozen=True)
class Metrics:
    """The choice and the names of the logged numbers.

    Attributes:
        measures: measures to log; None: the defaults.
        scalars: "few", or "all" for those of every layer.
        separator: replaces the slash in names.
        name: distinguishes several monitors of one run, as in `summary_scalars`.

    Raises:
        ValueError: a measure or choice is unknown, or the separator is not a text.
    """

    measures: tuple[str, ...] | None = None
    scalars: Scalars = "few"
    separator: str = "/"
    name: str = ""

    def __post_init__(self) -> None:
        if self.measures is not None:
            object.__setattr__(self, "measures", known_measures(self.measures))
        if self.scalars not in get_args(Scalars):
            raise ValueError(f"scalars={self.scalars!r}: expected 'few' or 'all'")
        if not isinstance(self.separator, str) or not self.separator:
            raise ValueError(f"separator={self.separator!r}: expected a text such as '/' or '_'")

    @property
    def followed(self) -> tuple[str, ...]:
        """The measures that callbacks may monitor, which have a summary."""
        return self.measures or DEFAULT_MEASURES

    def board(self, report: StepReport) -> dict[str, float]:
        """Return the scalars of a report for a dashboard, by name."""
        return self.named(board_scalars(report, self.measures, self.scalars, self.name))

    def summary(self, report: StepReport) -> dict[str, float]:
        """Return the scalars of a report for callbacks, by tag."""
        return summary_scalars(report, self.followed, self.name)

    def to_follow(self, options: Mapping[str, object]) -> tuple[str, ...]:
        """Return the names in `summary` for a monitor with these options."""
        given = {name for name, value in options.items() if not (value is None or value is False)}
        absent = {m for name, extra in _OPTIONAL.items() if name not in given for m in extra}
        there = [measure for measure in self.followed if measure not in absent]
        tags = [tag for measure in there for tag in summary_tags(measure, self.name).values()]
        tags.append(f"{summary_group(self.name)}/coverage")
        return tuple(self.named(dict.fromkeys(tags, 0.0)))

    def named(self, scalars: Mapping[str, float]) -> dict[str, float]:
        """Return name → value for tags with slashes.

        >>> Metrics(separator="_").named({"adiv.summary/update_cosine_min": 0.5})
        {'adiv.summary_update_cosine_min': 0.5}
        """
        return {tag.replace("/", self.separator): value for tag, value in scalars.items()}


def known_measures(measures: Iterable[str]) -> tuple[str, ...]:
    """Return the measures as a tuple, in the given order.

    Raises:
        ValueError: a measure is unknown.
    """
    names = (measures,) if isinstance(measures, str) else tuple(measures)
    known = (*MEASURES, *ATTENTION_MEASURES, *ALIGNMENT_MEASURES)
    if unknown := [name for name in names if name not in known]:
        raise ValueError(
            f"measures={names}: there is no measure {', '.join(map(repr, unknown))}. "
            f"Choose from {', '.join(known)}."
        )
    return names


def layer_scalars(report: StepReport, measures: Iterable[str]) -> dict[str, float]:
    """Return `adiv.<measure>/<module path>` → value, for the measures that were taken.

    Dashboards group by the text before the first slash, so a group has all layers of a measure.
    """
    return {
        f"adiv.{measure}/{path}": value
        for measure in measures
        for path, reading in report.readings(measure).items()
        if (value := getattr(reading, measure)) is not None
    }


def block_scalars(report: StepReport, measures: Iterable[str]) -> dict[str, float]:
    """Return `adiv.<measure>/<block>` → median of its layers, for at most eight blocks.

    Where a block has layers that map features to features, only those count: the steps of gains and
    offsets are not comparable with theirs. NaN if no layer has a direction.
    """
    found = {}
    for measure in measures:
        readings = report.readings(measure)
        for block, paths in blocks(readings).items():
            of_block = [readings[path] for path in paths]
            maps = [r for r in of_block if getattr(r, "kind", "") not in NO_MAPS] or of_block
            values = [v for r in maps if (v := getattr(r, measure)) is not None]
            if values:
                known = [value for value in values if not math.isnan(value)]
                found[f"adiv.{measure}/{block}"] = median(known) if known else math.nan
    return found


def board_scalars(
    report: StepReport, measures: Iterable[str] | None, scalars: Scalars, name: str = ""
) -> dict[str, float]:
    """Return the scalars for a dashboard: the summary, and those of each block or each layer.

    Args:
        report: report of a step.
        measures: measures to include; None: `FRONT_MEASURES`, or with "all" `DEFAULT_MEASURES`.
        scalars: "few" for blocks or "all" for layers.
        name: distinguishes several monitors of one run, as in `summary_scalars`.
    """
    if scalars == "all":
        chosen = DEFAULT_MEASURES if measures is None else tuple(measures)
        parts = layer_scalars(report, chosen)
    else:
        chosen = FRONT_MEASURES if measures is None else tuple(measures)
        parts = block_scalars(report, BLOCK_MEASURES if measures is None else chosen)
    return {**parts, **summary_scalars(report, chosen, name)}


def summary_scalars(
    report: StepReport, measures: Iterable[str], name: str = ""
) -> dict[str, float]:
    """Return `adiv.summary/<measure>_min`, `…_median` and `…_max` over layers, without NaN values.

    Those of sizes begin with `adiv.sizes`, where norms of the whole gradient and update, and the
    share of clipped steps, stand too, if they are known. Further tags: `adiv.summary/coverage`; if
    known, `adiv.summary/realised_loss_change` and `adiv.summary/descent`; if there are any,
    `adiv.summary/alarms`, the number of alarms.

    Args:
        report: the report to summarise.
        measures: measures to include.
        name: distinguishes several monitors of one run: the tags become `adiv.summary.<name>/…`.
    """
    summary = report.summary()
    scalars = {
        tag: getattr(summary[measure], end)
        for measure in measures
        if measure in summary
        for end, tag in summary_tags(measure, name).items()
    }
    others = {"coverage": report.coverage}
    if report.realised_loss_change is not None and report.descent is not None:
        others |= {"realised_loss_change": report.realised_loss_change, "descent": report.descent}
    if report.alarms:
        others["alarms"] = len(report.alarms)
    sizes, own = summary_group(name, "sizes"), {tag: getattr(report, tag) for tag in _WHOLE}
    scalars |= {f"{sizes}/{tag}": x for tag, x in own.items() if x is not None}
    return scalars | {f"{summary_group(name)}/{tag}": value for tag, value in others.items()}


def summary_tags(measure: str, name: str = "") -> dict[str, str]:
    """Return the tags in `summary_scalars` of a measure's min, median and max."""
    group = summary_group(name, "sizes" if measure in SIZES else "summary")
    return {end: f"{group}/{measure}_{end}" for end in ("min", "median", "max")}


def summary_group(name: str, group: str = "summary") -> str:
    """Return the group of the tags in `summary_scalars`, which are of a summary or of sizes."""
    return f"adiv.{group}.{name}" if name else f"adiv.{group}"
