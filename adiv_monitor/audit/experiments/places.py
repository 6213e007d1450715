"""Places of outputs: padding and classes without a gradient, and the tokens that come next."""

from collections.abc import Iterable, Iterator
from itertools import accumulate, product
from operator import mul
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from adiv_monitor.audit.experiments.calls import Call, calls_of, see_calls
from adiv_monitor.audit.experiments.changed_inputs import ChangedInputs, given_inputs
from adiv_monitor.audit.experiments.data import labels_of, spread
from adiv_monitor.audit.experiments.loss_inputs import CLASSIFIES, LOSSES
from adiv_monitor.audit.experiments.questions import Untold, asks, looks
from adiv_monitor.audit.training.batches import size_of, tensors
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.capture.batch import MOST_CLASSES
from adiv_monitor.diagnosis.record import Fact
from adiv_monitor.diagnosis.seen import never_occurring

# Padding is the same value at the end (or the beginning) of rows, nowhere else, at two places or
# more in this share of the rows. Its lengths differ, or it fills more than half of every row.
ROWS = 0.25
MOST = 0.5
# Share of the padding that has a gradient: where the loss leaves padding out, it is 0.
COUNTS = 0.5
# Of classes without a gradient: most batches, fewest labels of the class, and the share of the
# labels of other classes that have a gradient, at least.
CLASS_BATCHES, SAMPLES, TAUGHT = 8, 8, 0.5
PLACES = 0.25  # of an axis; a few at its end have no target


class _Outputs:
    """What the model is given and returns, and the targets of loss functions, in one pass.

    After the backward pass, what the model has returned has a gradient.
    """

    def __init__(self, fork: Fork) -> None:
        self.given: list[Tensor] = []
        self.made: list[Tensor] = []
        self.targets: list[Tensor] = []
        self.hook = fork.model.register_forward_hook(self._note, with_kwargs=True)

    def _note(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        for x in tensors(output):
            if x.is_floating_point() and x.requires_grad:
                x.retain_grad()
                self.made.append(x)
        self.given += [x.detach() for x in tensors((args, kwargs))]

    def see(self, call: Call) -> None:
        """Note the targets; classes beyond the scores, as an `ignore_index` may be, become −1."""
        target = call.argument(1, "target") if call.name in (*CLASSIFIES, *LOSSES) else None
        if isinstance(target, Tensor):
            scores, y = call.argument(0, "input"), target.detach()
            is_class = call.name in ("cross_entropy", "nll_loss") and 0 < y.ndim < scores.ndim
            self.targets.append(y.long().where(y < scores.shape[1], -1) if is_class else y)

    def at(self, labels: Tensor) -> Tensor | None:
        """Return which labels' places have a gradient in some output; None: no output has them.

        Places (B, T) are those of outputs (B, T, C), (B, C, T) and (B·T, C).
        """
        found = []
        for g in (x.grad for x in self.made if x.grad is not None and x.ndim):
            moved = g if g.ndim < 3 else g.movedim(1, -1)
            for of_places in (g, moved) if g.ndim == 3 else (moved, g):
                if labels.numel() in accumulate(of_places.shape, mul):
                    found.append(of_places.reshape(labels.numel(), -1).ne(0).any(1))
                    break
        return torch.stack(found).any(0).reshape(labels.shape) if found else None


class Padding(NamedTuple):
    """The padding of rows (B, T).

    Attributes:
        places: The places that are padding.
        inside: Those beside others that are, on the side of the real places: only their targets
            are padding, too, if targets are the next, or the previous, tokens.
    """

    places: Tensor
    inside: Tensor


@looks("padding-counts")
class PaddingCounts(_Outputs):
    """Tells the share of padding in the places with a gradient of the loss.

    Places are compared by the model's outputs: a mask, weights or an `ignore_index` that leave
    padding out leave no gradient there. Padding whose targets differ may be meant to count.
    """

    def facts(self, loss: Tensor) -> Iterable[Fact]:
        """Return the first padding that counts."""
        for x in self.given if self.targets else ():
            found = padding(x)
            if found is not None and (share := self._share(found)):
                return (Fact("", {"share": share}),)
        return ()

    def _share(self, found: Padding) -> float:
        """Return the share of padding in the places with a gradient; 0 if most has none."""
        counts, places = self.at(found.places), found.places
        if counts is None or not float(counts[found.inside].float().mean()) > COUNTS:
            return 0.0
        known = [y.reshape(*places.shape, -1)[found.inside] for y in self.targets
                 if y.numel() % places.numel() == 0]  # fmt: skip
        # Negative classes are ignored ones, such as the last place of labels that were shifted.
        known = [y if y.is_floating_point() else y[y >= 0] for y in known]
        is_alike = any(len(y) and bool((y == y[0]).all()) for y in known)
        return float((counts & places).sum() / counts.sum()) if is_alike else 0.0


def padding(x: Tensor) -> Padding | None:
    """Return the padding of tokens (B, T), or of vectors (B, T, F); None: there is none.

    Tokens of padding are those of most rows' last, or first, place; vectors are zero.
    """
    if x.is_complex() or x.dtype == torch.bool or not x.numel():
        return None
    if x.ndim == 3:
        candidates = [(x == 0).all(-1)]
    elif x.ndim == 2 and not x.is_floating_point() and int(x.max()) > 1:  # up to 1: a mask
        candidates = [x == x[:, end].mode().values for end in (-1, 0)]
    else:
        return None
    for places in candidates:
        counts, length = places.sum(1), x.shape[1]
        shortest, longest = int(counts.min()), int(counts.max())
        is_filled = shortest < longest or MOST * length < longest < length
        if is_filled and float((counts >= 2).float().mean()) >= ROWS:
            for step in (1, -1):  # from the real places to the padding
                before = places.roll(step, 1)
                before[:, 0 if step == 1 else -1] = False
                if not bool((before & ~places).any()):
                    return Padding(places, places & before)
    return None


@asks("class-untaught")
def class_untaught(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return labels, and columns of the outputs, without a gradient, and missing classes."""
    yield from _missing(setup)
    yield from _unread(setup, trained)
    yield from _without_gradient(setup, trained)


def _missing(setup: Setup) -> Iterator[Fact]:
    """Yield that classes never occur, if the labels of the batches are the targets of a loss."""
    labels = labels_of(setup.batches)
    calls = calls_of(setup.fork(), lambda call: call.name in ("cross_entropy", "nll_loss"))
    for scores, targets in [(c.argument(0, "input"), c.argument(1, "target")) for c in calls[:1]]:
        is_of = labels and scores.ndim == 2 and torch.equal(labels[0], targets.double().cpu())
        if is_of and scores.shape[1] <= MOST_CLASSES:
            every = torch.cat(labels)
            yield from never_occurring([int((every == c).sum()) for c in range(scores.shape[1])])


def _unread(setup: Setup, trained: Fork) -> Iterator[Fact]:
    """Yield how many parts of an output have no gradient in any batch, along each of its axes.

    That is so before and after training. Outputs without any gradient are not used. Costly steps
    leave no passes for so many batches. A single place may be chosen, and padding left out, or
    samples that a mask marks, such as unlabelled nodes of a graph.
    """
    read: dict[tuple[int, str], Tensor] = {}
    if setup.is_costly:
        return
    batches = spread(setup.batches, CLASS_BATCHES)
    for fork, batch in product((setup.fork(), setup.fork_like(trained)), batches):
        seen = _passed(fork, batch)
        is_padded = any(padding(x) or _ends_alike(x) for x in seen.given)
        if any(x.grad is not None and not x.grad.isfinite().all() for x in seen.made):
            return  # another finding
        for number, g in enumerate(x.grad for x in seen.made):
            if g is None or g.ndim < 2 or len(g) != size_of(batch) or not g.any():
                continue
            columns = 1 if g.ndim > 3 else g.ndim - 1
            marked = any(x.dtype == torch.bool and x.shape == g.shape[:1] for x in tensors(batch))
            for axis in range(marked, g.ndim):
                of = "columns" if axis == columns else f"places along axis {axis}"
                of = of if axis else "samples of a batch"
                each = g.movedim(axis, 0).flatten(1).ne(0).any(1)
                known = read.get((number, of), each)
                alike = known.shape == each.shape and not (is_padded and "places" in of)
                read[number, of] = known | each if alike else each | True
    for (_, of), each in read.items():
        without, length = int((~each).sum()), len(each)
        least = PLACES if "places" in of else 1 - PLACES  # of samples, others may have no target
        many = without >= least * length and not (without == length - 1 and "places" in of)
        if without and (of == "columns" or many):
            numbers = {"unread": without, "length": length, "first": int(each.int().argmin())}
            yield Fact("", numbers, {"of": of})


def _ends_alike(x: Tensor) -> bool:
    """Return whether the last places of all samples are the same, as those of padding are."""
    return x.ndim > 1 and x.shape[1] > 2 and bool((x[:, -2:] == x[:1, -1:]).all())


def _passed(fork: Fork, batch: Any) -> "_Outputs":
    """Return what the model returns for a batch, with gradients, and targets."""
    seen = _Outputs(fork)
    with torch.enable_grad():
        see_calls(fork, seen.see, batch).backward()  # type: ignore[no-untyped-call]
    seen.hook.remove()
    fork.optimizer.zero_grad()
    return seen


def _without_gradient(setup: Setup, trained: Fork) -> Iterator[Fact]:
    """Yield classes of which no label's place has a gradient, before and after training.

    Of the labels of other classes, more than half have one before training: what is learnt needs
    none. There may be a label for each sample, token or pixel; booleans of places are masks. A
    class of padding alone is none, and one of most tokens marks those without a label.
    """
    batches = spread(setup.batches, CLASS_BATCHES)
    seen: list[list[Tensor]] = []
    for fork, batch in product((setup.fork(), setup.fork_like(trained)), batches):
        seen.append(_labelled(fork, batch))
        labels, taught, is_real = map(torch.cat, zip(*seen, strict=True))
        classes: Tensor = torch.unique(labels[labels >= 0])
        still = classes[~torch.isin(classes, labels[taught])]
        if not len(still):
            return
    of = len(labels) // 2
    others = (labels >= 0) & ~torch.isin(labels, still)
    if not float(taught[:of][others[:of]].float().mean()) > TAUGHT:
        return
    several = of > sum(map(size_of, batches)) and len(torch.unique(labels[others])) > 1
    for c in still[torch.isin(still, labels[is_real])].tolist():
        samples = int((labels == c).sum()) / 2
        if samples >= SAMPLES and not (several and samples > of / 2):
            yield Fact("", {"label": c, "samples": samples, "length": float(of)})


def _labelled(fork: Fork, batch: Any) -> list[Tensor]:
    """Return labels, whether the place of each has a gradient, and whether it is no padding."""
    seen, size = _passed(fork, batch), size_of(batch)
    of_places = [x for x in (*seen.targets, *tensors(batch))
                 if x.numel() > size and x.dtype != torch.bool and not x.is_floating_point()
                 and not any(torch.equal(x, y) for y in seen.given)]  # fmt: skip
    one_each = [x for x in tensors(batch) if x.shape[:1] == (size,) and x.numel() == size > 1]
    for x in (*of_places, *one_each):
        labels, taught = x.double(), seen.at(x)
        if taught is not None and torch.equal(labels, labels.round()):
            rows = x.reshape(size, -1) if x.numel() % size == 0 else x[None]
            along, across = padding(rows), padding(rows.T)
            places = along.places if along else across.places.T if across else rows != rows
            return [y.flatten().cpu() for y in (labels, taught, ~places)]
    raise Untold("no output and no class for each sample")


# Are the targets of a sequence the tokens that come next, and can the model see them?


_ALIKE = 0.99  # share of the targets without padding and ends
_SAME = 1e-5  # share of the outputs' length: rounding
_SHIFTS = (1, 0, -1, 2)  # where several fit, the first is meant


@asks("target-is-input")
def target_is_input(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Find targets that are not the tokens after the last one that an output depends on.

    A model that looks ahead may be an autoencoder, which reproduces its inputs on purpose. One that
    does not even see the token of its own place shifts its inputs itself.
    """
    for shift, reach, _ in _places(setup):
        if reach in (0, -1) and shift - reach != 1:
            yield Fact("", {"places": float(shift - reach)})


@asks("future-leak")
def future_leak(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Find targets that are the next tokens, in a model whose outputs depend on later inputs."""
    for shift, _, earlier in _places(setup):
        if shift == 1 and earlier > _SAME:
            yield Fact("", {"change": earlier})


def _places(setup: Setup) -> Iterator[tuple[int, int, float]]:
    """Yield where the targets of the first tokens lie, and what outputs depend on.

    Of several losses, one of the next tokens counts, and the others are additions to it.

    Yields:
        Places from a token to the token that is its target, and what `_change` returns.
    """
    given = given_inputs(setup.fork(), setup.batches[0]).values()
    if not any(x.ndim == 2 and _is_integer(x) for x in given):
        return
    calls = calls_of(setup.fork(), lambda call: call.name in ("cross_entropy", "nll_loss"))
    targets = [y for y in (call.argument(1, "target") for call in calls) if _is_integer(y)]
    if not targets:
        return
    run = ChangedInputs(setup.fork(), setup.batches[0])
    for number, tokens in enumerate(run.inputs):
        is_text = tokens.ndim == 2 and tokens.shape[1] > 2 and _is_integer(tokens)
        if not is_text or int(tokens.max()) <= 1:  # 1: the tensor is a mask
            continue
        shifts = [shift_of(tokens, y) for y in targets]
        shift = next((shift for shift in _SHIFTS if shift in shifts), None)
        if shift is not None and (change := _change(run, number, tokens)) is not None:
            yield shift, *change
            return


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
    x, y = pairs[0]
    own, apart = (z.flatten(2).norm(dim=2) for z in (x, x - y))
    earlier, later = (
        float(apart[:, part].norm() / own[:, part].norm().clamp(min=1e-30))
        for part in (slice(half), slice(half, None))
    )
    if later <= _SAME:
        return None
    moved = (apart > _SAME * own).any(0).int()
    return int((tokens != other(tokens)).any(0).int().argmax() - moved.argmax()), earlier
