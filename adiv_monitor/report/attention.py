"""The reading of one attention module."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from adiv_monitor.report.reading import Reading, measures_of


@dataclass(frozen=True)
class AttentionReading(Reading):
    """One attention module at one step: how the step changed its scores. See `maths/attention.py`.

    Attributes:
        samples_seen: samples of the probe, with all heads.
        standard_error: measure → standard error; missing measures are exact.
        heads: measure → its value for every head.
        heads_standard_error: measure → standard error of every head's value; missing measures are
            exact.

    All other attributes are the measures, over all heads together.
    """

    samples_seen: int
    attention_cosine: float | None = None
    attention_gradient_cosine: float | None = None
    attention_scale_mean: float | None = None
    attention_scale_cv: float | None = None
    attention_logit_max: float | None = None
    attention_logit_step: float | None = None
    attention_query_norm: float | None = None
    attention_key_norm: float | None = None
    attention_entropy: float | None = None
    attention_first_share: float | None = None
    standard_error: Mapping[str, float] = field(default_factory=dict)
    heads: Mapping[str, tuple[float, ...]] = field(default_factory=dict, repr=False)
    heads_standard_error: Mapping[str, tuple[float, ...]] = field(default_factory=dict, repr=False)

    def to_rows(self) -> list[dict[str, Any]]:
        """Return a flat record per head, with `<measure>_standard_error` for inexact measures."""
        columns = dict(self.heads)
        columns |= {f"{m}_standard_error": e for m, e in self.heads_standard_error.items()}
        heads = enumerate(zip_longest(*columns.values()))  # a file may have been edited
        return [{"head": head, **dict(zip(columns, of, strict=True))} for head, of in heads]


# All measures of attention, in the order of tables and dashboards.
ATTENTION_MEASURES = measures_of(AttentionReading)
