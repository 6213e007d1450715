"""Are the targets of a sequence its own tokens, or visible to the model as later inputs?"""

import torch
from torch import Tensor

from adiv_monitor.audit.seen.calls import Call, see_calls
from adiv_monitor.audit.seen.changed_inputs import ChangedInputs
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.diagnosis.record import Fact, Probed

_ALIKE = 0.99  # share of the targets without padding and ends
_SAME = 1e-5  # share of the outputs' length: rounding
_LOSSES = ("cross_entropy", "nll_loss")
_NO_PLACES = "no output has the places of the inputs"


def target_is_input(setup: Setup, trained: Fork) -> Probed:
    """Find targets that equal the inputs at the same places, in a model that does not look ahead.

    A model that looks ahead may be an autoencoder, which reproduces its inputs on purpose.
    """
    ahead = _ahead(setup, 0)
    if isinstance(ahead, str):
        return Probed(untold=ahead)
    return Probed((Fact("", {"share": 1.0}),) if ahead is not None and ahead <= _SAME else ())


def future_leak(setup: Setup, trained: Fork) -> Probed:
    """Find targets that are the next tokens, in a model whose outputs depend on later inputs."""
    ahead = _ahead(setup, 1)
    if isinstance(ahead, str):
        return Probed(untold=ahead)
    return Probed((Fact("", {"change": ahead}),) if ahead is not None and ahead > _SAME else ())


def _ahead(setup: Setup, shift: int) -> float | str | None:
    """Return how far outputs depend on later inputs if the targets are the inputs so far on.

    Args:
        setup: training setup.
        shift: 0: targets are the inputs of the same places; 1: those of the next places.

    Returns:
        The change of the outputs relative to their length; the reason why it is not known; None:
        the targets are not those inputs.
    """
    targets: list[Tensor] = []

    def look(call: Call) -> None:
        given = call.argument(1, "target") if call.name in _LOSSES else None
        if isinstance(given, Tensor) and _is_integer(given):
            targets.append(given.detach().clone())

    with torch.no_grad():
        see_calls(setup.fork(), look)
    if not targets:
        return None
    changed = ChangedInputs(setup.fork(), setup.batches[0])
    for number, tokens in enumerate(changed.inputs):
        is_text = tokens.ndim == 2 and tokens.shape[1] > 2 and _is_integer(tokens)
        if not is_text or int(tokens.max()) <= 1:  # 1: the tensor is a mask
            continue
        if shift not in {shift_of(tokens, x) for x in targets}:
            continue
        change = _change(changed, number, tokens)
        if change is None:
            return _NO_PLACES
        earlier, later = change
        if later > _SAME:  # labels, which a model may receive too, change no output
            return earlier
    return None


def _is_integer(x: Tensor) -> bool:
    return not x.is_floating_point() and not x.is_complex() and x.dtype != torch.bool


def shift_of(tokens: Tensor, targets: Tensor) -> int | None:
    """Return 1 if the targets are the next tokens, 0 if they are the same ones, else None.

    The targets are one for each place, or for each but the first or the last. Negative ones are
    ignored.
    """
    size, length = tokens.shape
    if targets.numel() == size * length:
        labels = targets.reshape(size, length)
        pairs = ((labels[:, :-1], tokens[:, 1:]), (labels, tokens))
    elif targets.numel() == size * (length - 1):
        labels = targets.reshape(size, length - 1)
        pairs = ((labels, tokens[:, 1:]), (labels, tokens[:, :-1]))
    else:
        return None
    return next((1 - i for i, pair in enumerate(pairs) if _share(*pair) >= _ALIKE), None)


def _share(labels: Tensor, tokens: Tensor) -> float:
    """Return the share of the labels that equal the tokens; labels to ignore do not count."""
    real = labels >= 0
    return float((labels == tokens)[real].float().mean()) if bool(real.any()) else 0.0


def _change(changed: ChangedInputs, number: int, tokens: Tensor) -> tuple[float, float] | None:
    """Return how far outputs of the first and second half change with tokens of the second half.

    The changes are relative to their length; None if no output has the places of the tokens.
    """
    half = tokens.shape[1] // 2

    def other(x: Tensor) -> Tensor:
        later = x.clone()
        later[:, half:] = x[:, half:].roll(1, 0) if len(x) > 1 else x[:, half:].flip(1)
        return later

    seen = [
        x
        for outputs in (changed.own, changed.outputs(number, other))
        for x in [x for x in outputs if x.ndim >= 3 and x.shape[:2] == tokens.shape][:1]
    ]
    if len(seen) != 2:
        return None
    own, moved = seen
    parts = ((own[:, :half], moved[:, :half]), (own[:, half:], moved[:, half:]))
    earlier, later = (float((x - y).norm() / x.norm().clamp(min=1e-30)) for x, y in parts)
    return earlier, later
