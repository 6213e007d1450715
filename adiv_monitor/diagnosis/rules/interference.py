"""The rule about rows that disturb each other in the same step."""

from collections.abc import Iterator

from adiv_monitor.diagnosis.finding import Advice, Evidence, Finding
from adiv_monitor.diagnosis.readings import by_layer, named
from adiv_monitor.diagnosis.record import Record

LOW_COSINE = 0.1  # cosine of the gradient step with the ideal one
ROOM = 5.0  # ratio of the ceiling to the cosine: how much better a step could be
_NORMALISE = Advice("add batch normalisation in front of these layers", "batch-norm")


def interference(record: Record) -> Iterator[Finding]:
    """Find layers whose gradient step has a low cosine although a better step exists."""
    cosines = by_layer(record, "gradient_cosine")
    ceilings = by_layer(record, "attainable_cosine")
    lost = {
        path: cosine.value
        for path, cosine in cosines.items()
        if path in ceilings
        and cosine.below(LOW_COSINE)
        and ceilings[path].value - 2 * ceilings[path].error > ROOM * abs(cosine.value)
    }
    if lost:
        layers = tuple(sorted(lost, key=lambda path: lost[path]))
        worst = layers[0]
        yield Finding(
            "interference",
            layers,
            "note",
            (
                Evidence("gradient_cosine", lost[worst], LOW_COSINE, worst),
                Evidence("attainable_cosine", ceilings[worst].value, layer=worst),
            ),
            () if _reads_tokens(record) else (_NORMALISE,),
            f"In {named(record, worst)}, the rows of a batch disturb each other: a gradient step "
            f"moves the activations with a cosine of {lost[worst]:.3g} to straight downhill, but "
            f"the best possible step reaches {ceilings[worst].value:.3g}.",
            "Corrected layers remove differences in scale, not interference.",
            against=("affine-like", "norm-like"),
        )


def _reads_tokens(record: Record) -> bool:
    """Return whether rows may be tokens: batch normalisation would mix later into earlier ones."""
    return any(r.kind == "embedding" for report in record.reports for r in report.layers.values())
