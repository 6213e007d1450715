"""Rules about how signals pass through the layers as they were initialised."""

from collections.abc import Iterator

from adiv_monitor.audit.diagnosis.course import fell, rose
from adiv_monitor.audit.diagnosis.seen import by_layer, gradients
from adiv_monitor.audit.finding import Advice, Evidence, Finding
from adiv_monitor.audit.record import Record

# First loss over that of knowing nothing. Initialisations as torch has them keep it below 1.5.
FIRST_LOSS = 3.0
# ‖gradient‖ of the first layers over that of the last ones: AUTOTRAINER's limits (X. Zhang et al.,
# ICSE 2021) are 1e-3 and 70.
VANISHED, EXPLODED = 1e-3, 1e3


def bad_initialisation(record: Record) -> Iterator[Finding]:
    """The model begins far worse than one that knows nothing."""
    if record.chance is None or not record.losses or not record.chance > 0:
        return
    ratio = record.losses[0] / record.chance
    if not ratio > FIRST_LOSS:
        return
    yield Finding(
        "bad-initialisation",
        tuple(by_layer(record, "scale_mean"))[-1:],
        "act" if ratio > 10 or not fell(record) else "watch",
        (Evidence("loss", record.losses[0], FIRST_LOSS * record.chance, step=0),),
        (
            Advice("initialise the weights anew, by their fan-in (He for ReLU, Xavier for tanh)",
                   "reinitialise"),
            Advice("layer normalisation in front of the last layer", "layer-norm"),
        ),
        f"The first loss is {record.losses[0]:.3g}; knowing nothing gives {record.chance:.3g}: the "
        "outputs begin far too large.",
        "A lower learning rate keeps wrong certainty for longer.",
        0,
    )  # fmt: skip


def vanishing(record: Record) -> Iterator[Finding]:
    """Gradients that hardly reach the first layers."""
    norms = gradients(record)
    ratio = _first_over_last(norms)
    if ratio is not None and ratio < VANISHED:
        least = min(norms, key=lambda path: norms[path])
        yield Finding(
            "vanishing",
            tuple(p for p in norms if norms[p] < VANISHED * max(norms.values())),
            "watch" if fell(record) else "act",
            _evidence(norms, ratio, VANISHED),
            (
                Advice("layer normalisation in front of the layers", "layer-norm"),
                Advice("initialise the weights anew, by their fan-in", "reinitialise"),
                Advice("ReLU-like activation functions in place of sigmoids, or residual paths"),
            ),
            f"The gradient that reaches {least} is {ratio:.1g} of the last layer's: the first "
            "layers hardly hear of the loss.",
            "A higher learning rate for all moves the last layers too far before the first move.",
        )


def exploding(record: Record) -> Iterator[Finding]:
    """Gradients that grow on their way to the first layers."""
    norms = gradients(record)
    ratio = _first_over_last(norms)
    if ratio is not None and ratio > EXPLODED:
        yield Finding(
            "exploding",
            tuple(p for p in norms if norms[p] > EXPLODED * min(norms.values())),
            "act" if rose(record) or not fell(record) else "watch",
            _evidence(norms, ratio, EXPLODED),
            (
                Advice("initialise the weights anew, by their fan-in", "reinitialise"),
                Advice("layer normalisation in front of the layers", "layer-norm"),
                Advice("clip the gradient's norm", "clip"),
            ),
            f"The first layer's gradient is {ratio:.0f} times that of the last.",
            "",
        )


def _first_over_last(norms: dict[str, float]) -> float | None:
    values = list(norms.values())
    if len(values) < 3 or values[-1] <= 0:
        return None
    return values[0] / values[-1]


def _evidence(norms: dict[str, float], ratio: float, limit: float) -> tuple[Evidence, ...]:
    first, *_, last = norms
    return (
        Evidence("gradient of the first over the last layer", ratio, limit),
        Evidence("gradient of the activations", norms[first], layer=first),
        Evidence("gradient of the activations", norms[last], layer=last),
    )
