"""Are the targets of a sequence the tokens that come next, and can the model see them?"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from adiv_monitor.audit.experiments.calls import calls_of
from adiv_monitor.audit.experiments.changed_inputs import ChangedInputs, given_inputs
from adiv_monitor.audit.experiments.questions import Untold, asks
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.diagnosis.record import Fact

_ALIKE = 0.99  # share of the targets without padding and ends
_SAME = 1e-5  # share of the outputs' length: rounding
_LOSSES = ("cross_entropy", "nll_loss")
_SHIFTS = (1, 0, -1, 2)  # where several fit, the first is meant
# Share of the labels between the first and the last of a sequence that are ignored, beyond which
# the loss chooses places on purpose. Separators between sentences are fewer.
_LEFT_OUT = 0.1


class _Places(NamedTuple):
    """Where the targets of a sequence lie among its tokens.

    Attributes:
        shift: Places from a token to the token that is its target.
        reach: Places from an output to the last token that it depends on.
        earlier: Change of the outputs of the first half with tokens of the second half, relative
            to their length.
        shown: Whether the model looks ahead, the loss chooses some places, whose targets are the
            tokens of these places, and the model sees them.
    """

    shift: int
    reach: int
    earlier: float
    shown: bool


@asks("target-is-input")
def target_is_input(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Find targets that are not the tokens after the last one that an output depends on.

    A model that looks ahead may be an autoencoder, which reproduces its inputs on purpose. One that
    does not even see the token of its own place shifts its inputs itself.
    """
    found = _places(setup)
    if found and found.shown:
        return (Fact("", {"places": 0.0}, {"of": "chosen places"}),)
    if found and found.reach in (0, -1) and found.shift - found.reach != 1:
        return (Fact("", {"places": float(found.shift - found.reach)}),)
    return ()


@asks("future-leak")
def future_leak(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Find targets that are the next tokens, in a model whose outputs depend on later inputs."""
    found = _places(setup)
    leaks = found and found.shift == 1 and found.earlier > _SAME
    return (Fact("", {"change": found.earlier}),) if found and leaks else ()


def _places(setup: Setup) -> _Places | None:
    """Return where the targets lie; None: they are no inputs.

    Of several losses, one of the next tokens counts, and the others are additions to it.
    """
    given = given_inputs(setup.fork(), setup.batches[0]).values()
    if not any(x.ndim == 2 and _is_integer(x) for x in given):
        return None
    calls = calls_of(setup.fork(), lambda call: call.name in _LOSSES)
    targets = [y for y in (call.argument(1, "target") for call in calls) if _is_integer(y)]
    run = ChangedInputs(setup.fork(), setup.batches[0]) if targets else None
    for number, tokens in enumerate(run.inputs if run else ()):
        is_text = tokens.ndim == 2 and tokens.shape[1] > 2 and _is_integer(tokens)
        if run is None or not is_text or int(tokens.max()) <= 1:  # 1: the tensor is a mask
            continue
        found = {shift_of(tokens, y): y for y in reversed(targets)}
        shift = next((shift for shift in _SHIFTS if shift in found), None)
        change = None if shift is None else _change(run, number, tokens)
        if shift is not None and change is not None:
            reach, earlier = change
            chosen = chosen_places(tokens, found[shift]) if shift == 0 and earlier > _SAME else None
            shown = chosen is not None and _sees(run, number, chosen)
            return _Places(shift, reach, earlier, shown)
    return None


def chosen_places(tokens: Tensor, targets: Tensor) -> Tensor | None:
    """Return the places that the loss chooses out of each sequence; None: it takes all, or an end.

    Targets of other places are negative, as for a masked language model.
    """
    if targets.numel() != tokens.numel():
        return None
    counts = targets.reshape(tokens.shape) >= 0
    within = (counts.cumsum(1) > 0) & (counts.flip(1).cumsum(1).flip(1) > 0)
    left_out = (within & ~counts).sum() > _LEFT_OUT * within.sum()
    return counts if bool(left_out) else None


def _sees(run: ChangedInputs, number: int, places: Tensor) -> bool:
    """Return whether outputs depend on the tokens of these places: a model may mask them itself."""
    others = run.outputs(lambda x: torch.where(places, x.roll(1, 0), x), number)
    alike = zip(run.own, others, strict=True)
    return any(float((x - y).norm()) > _SAME * float(x.norm()) for x, y in alike)


def _is_integer(x: Tensor) -> bool:
    return not x.is_floating_point() and not x.is_complex() and x.dtype != torch.bool


def shift_of(tokens: Tensor, targets: Tensor) -> int | None:
    """Return how many places after each token its target stands; None: the targets are no tokens.

    The targets are one for each place, or for each but the last. Negative ones are ignored.
    """
    size, length = tokens.shape
    count = targets.numel() // max(size, 1)
    if count not in (length, length - 1) or targets.numel() != size * count:
        return None
    labels = targets.reshape(size, count)
    for shift in _SHIFTS:
        first, end = max(0, -shift), min(count, length - shift)
        real = labels[:, first:end] >= 0
        alike = (labels[:, first:end] == tokens[:, first + shift : end + shift])[real]
        if len(alike) and float(alike.float().mean()) >= _ALIKE:
            return shift
    return None


def _change(run: ChangedInputs, number: int, tokens: Tensor) -> tuple[int, float] | None:
    """Exchange the tokens of the second half.

    Returns:
        Places from the first output that changes to the first token that does, and the change of
        the outputs of the first half, relative to their length; None: no output of the second half
        changes, as with labels, which a model may receive too.

    Raises:
        Untold: No output has the places of the inputs.
    """
    half = tokens.shape[1] // 2

    def other(x: Tensor) -> Tensor:
        later = x[:, half:].roll(1, 0) if len(x) > 1 else x[:, half:].flip(1)
        return torch.cat([x[:, :half], later], 1)

    pairs = [(x, y) for x, y in zip(run.own, run.outputs(other, number), strict=True)
             if x.ndim >= 3 and x.shape[:2] == tokens.shape]  # fmt: skip
    if not pairs:
        raise Untold("no output has the places of the inputs")
    own, apart = (
        pairs[0][0].flatten(2).norm(dim=2),
        (pairs[0][0] - pairs[0][1]).flatten(2).norm(dim=2),
    )
    earlier, later = (
        float(apart[:, part].norm() / own[:, part].norm().clamp(min=1e-30))
        for part in (slice(half), slice(half, None))
    )
    if later <= _SAME:
        return None
    moved = (apart > _SAME * own).any(0).int()
    return int((tokens != other(tokens)).any(0).int().argmax() - moved.argmax()), earlier
