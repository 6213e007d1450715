"""Questions about the places of the outputs that have a gradient: of padding, and of classes."""

from collections.abc import Iterable
from itertools import accumulate, product
from operator import mul
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from adiv_monitor.audit.experiments.calls import Call, see_calls
from adiv_monitor.audit.experiments.questions import Untold, asks, looks
from adiv_monitor.audit.training.batches import size_of, tensors
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.diagnosis.record import Fact

# Padding is the same value at the end (or the beginning) of rows, nowhere else, at two places or
# more in this share of the rows. Its lengths differ, or it fills more than half of every row.
ROWS = 0.25
MOST = 0.5
# Share of the padding that has a gradient: where the loss leaves padding out, it is 0.
COUNTS = 0.5
# Of classes without a gradient: most batches, fewest labels of the class, and the share of the
# labels of other classes that have a gradient, at least.
CLASS_BATCHES, SAMPLES, TAUGHT = 8, 8, 0.5
_LOSSES = ("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss",
           "binary_cross_entropy", "binary_cross_entropy_with_logits")  # fmt: skip


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
        """Note the targets."""
        target = call.argument(1, "target") if call.name in _LOSSES else None
        if isinstance(target, Tensor):
            self.targets.append(target.detach())

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
                return (Fact("", {"share": share}, {"shape": str(tuple(x.shape))}),)
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
    """Return classes of which no label's place has a gradient, before and after training.

    Of the labels of other classes, more than half have one before training: what is learnt needs
    none. There may be a label for each sample, token or pixel. A class of padding alone is none,
    and one of most tokens marks those without a label.
    """
    count = min(CLASS_BATCHES, len(setup.batches))
    batches = [setup.batches[i * len(setup.batches) // count] for i in range(count)]
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
            yield Fact("", {"class": c, "samples": samples, "of": float(of)})


def _labelled(fork: Fork, batch: Any) -> list[Tensor]:
    """Return labels, whether the place of each has a gradient, and whether it is no padding."""
    seen, size = _Outputs(fork), size_of(batch)
    with torch.enable_grad():
        see_calls(fork, seen.see, batch).backward()  # type: ignore[no-untyped-call]
    seen.hook.remove()
    fork.optimizer.zero_grad()
    of_places = [x for x in (*seen.targets, *tensors(batch)) if x.numel() > size
                 and not x.is_floating_point() and not _is_among(x, seen.given)]  # fmt: skip
    one_each = [x for x in tensors(batch) if x.shape[:1] == (size,) and x.numel() == size > 1]
    for x in (*of_places, *one_each):
        labels, taught = x.double(), seen.at(x)
        if taught is not None and torch.equal(labels, labels.round()):
            rows = x.reshape(size, -1) if x.numel() % size == 0 else x[None]
            along, across = padding(rows), padding(rows.T)
            places = along.places if along else across.places.T if across else rows != rows
            return [y.flatten().cpu() for y in (labels, taught, ~places)]
    raise Untold("no output and no class for each sample")


def _is_among(x: Tensor, others: list[Tensor]) -> bool:
    return any(torch.equal(x, y) for y in others)
