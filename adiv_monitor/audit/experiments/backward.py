"""Questions about the backward pass: where gradients arrive, what they pass, what they are of."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from adiv_monitor.audit.experiments.calls import Call, change_calls, see_calls
from adiv_monitor.audit.experiments.derived import PRODUCTS, flat
from adiv_monitor.audit.experiments.questions import Untold, asks, looks
from adiv_monitor.audit.experiments.repeated_loss import RepeatedLoss
from adiv_monitor.audit.training.batches import copied, first, mapped, size_of, tensors
from adiv_monitor.audit.training.hooks import without_gradient_hooks
from adiv_monitor.audit.training.setup import Fork, Setup, seeded
from adiv_monitor.audit.training.train import held
from adiv_monitor.diagnosis.record import Fact


def nodes_of(ends: Iterable[Any]) -> set[Any]:
    """Return these nodes of a graph, and all that their gradients pass on to."""
    seen: set[Any] = set()
    left = list(ends)
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [before for before, _ in node.next_functions]
    return seen


def backward(fork: Fork) -> list[Tensor]:
    """Return the gradients that reach the optimizer from the first batch; zeros: none."""
    with seeded(fork.seed), torch.enable_grad():
        fork.loss(fork.model, copied(fork.batches[0])).backward()  # type: ignore[no-untyped-call]
        for hook in fork.optimizer._optimizer_step_pre_hooks.values():
            hook(fork.optimizer, (), {})
    return [torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
            for p in held(fork.optimizer)]  # fmt: skip


def dots(some: Sequence[Tensor], others: Sequence[Tensor]) -> tuple[float, float, float]:
    """Return the squared lengths of two gradients, and their product."""
    pairs = [(g.double(), h.double()) for g, h in zip(some, others, strict=True)]
    return (
        sum(float((g * g).sum()) for g, _ in pairs),
        sum(float((h * h).sum()) for _, h in pairs),
        sum(float((g * h).sum()) for g, h in pairs),
    )


def cosine(own: float, other: float, between: float) -> float:
    """Return the cosine, from what `dots` returns; 0 if a gradient is zero."""
    return between / math.sqrt(own * other) if own > 0 and other > 0 else 0.0


# Cuts and hooks


class Cuts:
    """Follows what has lost its gradient through a pass, as its calls are reported.

    A cut is a `detach()`, a `.data`, or a call under `torch.no_grad()` that depends on parameters.

    Attributes:
        found: The first function of each cut whose result meets a gradient, maybe indirectly.
        weighted: Those that meet parameters. Values that are added to another path with a gradient,
            as in a straight-through estimator, or compared with outputs, as the target of a siamese
            network, meet none.
    """

    def __init__(self) -> None:
        self._without: dict[int, tuple[Call, Tensor]] = {}  # tensors are held: ids stay unique
        self.found: list[Call] = []
        self.weighted: dict[int, Call] = {}

    def see(self, call: Call) -> None:
        """Look at a call after it has returned."""
        made = [x for x in flat(call.result) if x.is_floating_point()]
        given = list(flat([*call.args, *call.kwargs.values()]))
        # What a custom function computes without a graph has a gradient once it has returned.
        before = [self._without[id(x)][0] for x in given
                  if id(x) in self._without and not x.requires_grad]  # fmt: skip
        depends = any(x.requires_grad for x in given)
        if depends and (_detaches(call) or not torch.is_grad_enabled()):
            before = before or [call]
        elif any(x.requires_grad for x in made):
            self.found += before
            if any(x.requires_grad and x.is_leaf for x in given):
                self.weighted.update((origin.number, origin) for origin in before)
            return
        for origin in before[:1]:
            self._without.update((id(x), (origin, x)) for x in made if not x.requires_grad)


def _detaches(call: Call) -> bool:
    return call.name == "detach" or call.function == Tensor.data.__get__  # type: ignore[attr-defined]


def cuts(fork: Fork) -> list[Call]:
    """Return the cuts in front of parameters."""
    seen = Cuts()
    see_calls(fork, seen.see)
    return list(seen.weighted.values())


def undo(fork: Fork, found: list[Call]) -> None:
    """Undo the cuts at this place from now on; if it is under `no_grad()`, undo all of those."""
    numbers = {call.number for call in found}
    under = not all(map(_detaches, found))

    def change(call: Call) -> Any:
        if call.number in numbers and _detaches(call):
            return call.args[0]
        if under and not torch.is_grad_enabled():
            with torch.enable_grad():
                return call.function(*call.args, **call.kwargs)
        return NotImplemented

    change_calls(fork, change)


@asks("gradient-cut")
def gradient_cut(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return the cosine of the gradient with the gradient without the cut, for each cut.

    Only parameters whose gradient the cut changes count: in front of it there may be few. Also
    return the cosine of the gradient with the part that the cut removes: two players oppose each
    other.
    """
    found = cuts(setup.fork())
    if not found:
        return ()
    fork = setup.fork()
    undo(fork, found)
    pairs = zip(backward(setup.fork()), backward(fork), strict=True)
    changed = [(g, h) for g, h in pairs if not torch.equal(g, h)]
    as_it_is = [g for g, _ in changed]
    own, other, between = dots(as_it_is, [h for _, h in changed])
    removed = cosine(*dots(as_it_is, [h - g for g, h in changed]))
    numbers = {"cosine": cosine(own, other, between), "removed": removed}
    places = dict.fromkeys(call.place.replace("__get__", ".data") for call in found)
    return tuple(Fact(place, numbers) for place in places)


@asks("gradient-hooks")
def gradient_hooks(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Compare the gradient that reaches the optimizer with hooks and without any."""
    bare = setup.fork()
    if not without_gradient_hooks(bare.model, bare.optimizer):
        return ()
    own, changed, between = dots(backward(bare), backward(setup.fork()))
    if not own > 0 or not math.isfinite(changed):
        raise Untold("the gradient is not finite, or zero without hooks, too")
    ratio = math.sqrt(changed / own)
    return (Fact("", {"ratio": ratio, "cosine": cosine(own, changed, between)}),)


# The loss along its gradient

# Most parameters of the models that are copied in float64, for one loss and for those of players.
LARGEST, PLAYERS_LARGEST = 20_000_000, 100_000_000
SHORT = 1e-6  # length of a step, relative to the weights' length, and to the loss
AGREE = 0.05  # largest relative difference of the slopes of two steps
SAME = 1e-10  # largest relative difference of two computations of one loss
NOISE = 1e-3  # of the weights, so that the loss has no kink where they begin
MOST_PARTS = 4  # of a model that are taken for players
# Functions that turn a tensor into a number, or parameters into constants.
_CONSTANTS = ("item", "tolist", "__float__", "requires_grad", "__set__")


@contextmanager
def _in_float64(setup: Setup, batch: Any) -> Iterator[Fork]:
    """Yield a fork in float64, whose loss draws noise in float64, too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with seeded(setup.seed), torch.enable_grad():
            fork = setup.fork()
            fork.model.double()
            fork.batches = [mapped(batch, lambda x: x.double() if x.is_floating_point() else x)]
            yield fork
    finally:
        torch.set_default_dtype(before)


def descent_share(setup: Setup) -> float | None:
    """Return how much a few samples' loss falls along its gradient, relative to ‖gradient‖².

    (L(θ + hg) − L(θ − hg)) / (2h‖g‖²) as h → 0, with the same random numbers, in float64. It is 1
    if g is the gradient of the loss. It is less, or below 0, if parts of the loss oppose one
    another, as in the summed loss of a generative adversarial network, each of whose players has
    its own part of the gradient. So the model's parts are moved one by one, and the smallest share
    counts.

    Returns:
        The share; None if it is unknown: the model has one part, or too many for players; it is
        large, or does not run in float64; the loss changes weights; there is no gradient; steps of
        two lengths disagree.
    """
    size = sum(p.numel() for p in setup.model.parameters())
    if size > PLAYERS_LARGEST or not 1 < len(_parts(setup.model)) <= MOST_PARTS:
        return None
    with _in_float64(setup, first(setup.batches[0], 2)) as fork:
        try:
            loss, parts = _Descent(fork), _parts(fork.model)
            shares = [loss.share(list(part.parameters())) for part in parts]
        except Exception:  # the training run reports errors of the loss
            return None
    return min((share for share in shares if share is not None), default=None)


def _parts(model: nn.Module) -> list[nn.Module]:
    """Return the model's children that hold parameters; of an only child, its children."""
    parts = [child for child in model.children() if any(True for _ in child.parameters())]
    return _parts(parts[0]) if len(parts) == 1 else parts


class _Descent:
    """The loss of a fork's first batch, along the gradient of some parameters."""

    def __init__(self, fork: Fork) -> None:
        self._batch = fork.batches[0]
        self.repeated = RepeatedLoss(fork)
        self.loss = fork.loss(fork.model, copied(self._batch))
        self.value = float(self.loss.detach())

    def again(self) -> float:
        """Return the loss, computed anew."""
        return self.repeated.of(self._batch)

    def share(self, parameters: list[Tensor]) -> float | None:
        """Return the share of a short step.

        If it is not 1, a shorter step must have the same slope, or else the result is None.
        """
        found = torch.autograd.grad(self.loss, parameters, allow_unused=True, retain_graph=True)
        moved = [(p, p.detach().clone(), g.to_dense())
                 for p, g in zip(parameters, found, strict=True) if g is not None]  # fmt: skip
        square = sum(float(g.square().sum()) for *_, g in moved)
        weights = sum(float(here.square().sum()) for _, here, _ in moved)
        if not 0 < square < math.inf:
            return None
        h = SHORT * min((abs(self.value) or 1.0) / square, math.sqrt((weights or 1.0) / square))
        slope = self._slope(moved, h)
        if slope is None or abs(slope - square) < AGREE * square:
            return None if slope is None else slope / square
        shorter = self._slope(moved, h / 4)  # checks that the step is not too long
        if shorter is None or not abs(slope - shorter) <= AGREE * max(abs(slope), square):
            return None
        return slope / square

    @torch.no_grad()
    def _slope(self, moved: list[tuple[Tensor, Tensor, Tensor]], h: float) -> float | None:
        """Return the loss's slope between h gradients on both sides; None: it changes weights."""
        losses, is_kept = [], True
        for step in (h, -h, 0.0):
            for p, here, g in moved:
                p.copy_(here + step * g)
            if step:
                losses.append(self.again())
                is_kept &= all(torch.equal(p, here + step * g) for p, here, g in moved)
        return (losses[0] - losses[1]) / (2 * h) if is_kept else None


@asks("gradient-differs")
def gradient_differs(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return the decrease of the loss along its gradient, over the one that the gradient predicts.

    It is computed in float64, of the first batch, as by `descent_share`. The weights are the
    initial ones with a little noise, which avoids kinks such as |0|. Also name the custom functions
    that the backward pass goes through.
    """
    if sum(p.numel() for p in setup.model.parameters()) > LARGEST or setup.differentiates:
        raise Untold("the model is large, or the loss computes gradients itself")
    with _in_float64(setup, setup.batches[0]) as fork:
        without_gradient_hooks(fork.model, fork.optimizer)  # `gradient-hooks` tells of these
        moved: list[Tensor] = [p for p in fork.model.parameters() if p.requires_grad]
        for p in moved:
            p.data += NOISE * torch.randn_like(p)
        if why := _why_not(fork):
            raise Untold(why)
        loss = _Descent(fork)
        share = loss.share(moved)
        if share is None or not abs(loss.again() - loss.value) <= SAME * abs(loss.value):
            raise Untold("the loss is not finite or repeatable, or steps of two lengths disagree")
    nodes = (n for n in nodes_of([loss.loss.grad_fn]) if isinstance(n, BackwardCFunction))
    custom = {type(n)._forward_cls for n in nodes}  # type: ignore[attr-defined]
    names = sorted(c.__name__ for c in custom if not c.__module__.startswith("torch."))
    return (Fact(", ".join(names), {"ratio": share}),)


def _why_not(fork: Fork) -> str:
    """Return why the loss may differ from what its gradient is meant to be of; "": it may not."""
    found: list[str] = []
    seen = Cuts()

    def look(call: Call) -> None:
        seen.see(call)
        depends = any(x.requires_grad for x in flat([*call.args, *call.kwargs.values()]))
        if depends and call.name in _CONSTANTS:
            found.append(f"the gradient is cut on purpose: {call.place}")
        elif depends and any(x.is_floating_point() and x.dtype != torch.float64
                             for x in flat(call.result)):  # fmt: skip
            found.append(f"it does not run in float64: {call.place}")

    see_calls(fork, look)
    found += [f"the gradient is cut on purpose: {call.place}" for call in seen.found]
    return found[0] if found else ""


# Functions of zero slope

BATCHES = 4
SAMPLED = 1000  # entries whose values tell whether a function may be a step
FEWEST = 8  # entries of a clip; the ends of a range fit two entries of any function
MULTIPLIES = ("mul", "multiply", "__mul__", "__rmul__")
# Products, in which one argument may be weights that another network computes.
COMBINED = (*PRODUCTS, *MULTIPLIES, "conv1d", "conv2d", "conv3d")
LIKE = ("expand_as", "view_as", "reshape_as", "type_as")  # the second argument gives a shape
SCALES = (0.01, 1.0, 100.0)  # factors on the argument; no smooth function is flat near zero


@dataclass
class _Seen:
    """A call with the argument of its result's shape, and the gradients at both.

    Attributes:
        call: The call.
        given: The argument.
        argument: A copy of it.
        ends: The ends of the range to which entries are cut; None: more than that is done.
        gradient: The gradient at the result, if there is one.
        before: The gradient at the argument, on all ways to the loss.
    """

    call: Call
    given: Tensor
    argument: Tensor
    ends: tuple[float, float] | None
    gradient: list[Tensor] = field(default_factory=list)
    before: list[Tensor] = field(default_factory=list)


@asks("zero-slope")
def zero_slope(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return steps, which have no slope anywhere, and clips of what the last layer returns.

    A step counts if no gradient reaches its argument, on another way either.
    Of a clip, the entries count that the loss would pull back into its range: their share, among
    those with a gradient at its result, with the weights after training.
    """
    fork = setup.fork_like(trained)
    steps: dict[str, Fact] = {}
    clips: dict[str, tuple[int, int]] = {}  # entries that are stuck, and all with a gradient
    for batch in setup.batches[:BATCHES]:
        for seen in _with_gradients(fork, batch):
            place, x, g = seen.call.place, seen.argument, seen.gradient[0]
            try:
                is_step, is_clip = _is_step(seen), _is_clip(seen)
            except Exception:  # it may not run on another argument
                continue
            if is_step:
                steps.setdefault(place, Fact(place, {}, {"kind": "step"}))
            elif is_clip and seen.ends is not None:
                low, high = seen.ends
                stuck, count = clips.get(place, (0, 0))
                stuck += int((((x < low) & (g < 0)) | ((x > high) & (g > 0))).sum())
                clips[place] = stuck, count + int(g.ne(0).sum())
    shares = [Fact(place, {"share": stuck / count}, {"kind": "clip"})
              for place, (stuck, count) in clips.items() if count]  # fmt: skip
    return (*steps.values(), *shares)


def _with_gradients(fork: Fork, batch: Any) -> list[_Seen]:
    """Return calls whose result gets a gradient: possible steps, and clips of the outputs."""
    steps: list[_Seen] = []
    clips: list[_Seen] = []
    computed: list[Tensor] = []  # from parameters alone, as normalised weights are

    def is_weight(x: Tensor) -> bool:
        return (x.is_leaf and x.requires_grad) or any(x is other for other in computed)

    def look(call: Call) -> None:
        given = [x for x in (*call.args, *call.kwargs.values()) if isinstance(x, Tensor)]
        weights = [is_weight(x) for x in given]
        if weights and all(weights) and isinstance(call.result, Tensor):
            computed.append(call.result)
        elif len(given) > 1 and any(weights):
            clips.clear()  # a layer, which is no step even if its weights are zero
            return
        computing = {id(x) for x in given if x.requires_grad}
        if call.path is not None and call.name in COMBINED and len(computing) > 1:
            clips.clear()  # a layer whose weights another network computes
        try:
            seen = _candidate(call, given[:1] if call.name in LIKE else given)
        except Exception:  # a tensor of another kind, such as a nested one
            return
        if seen is not None:
            call.result.register_hook(seen.gradient.append)
            seen.given.register_hook(seen.before.append)  # type: ignore[no-untyped-call]
            (steps if seen.ends is None else clips).append(seen)

    with torch.enable_grad():
        see_calls(fork, look, batch).backward()  # type: ignore[no-untyped-call]
    fork.optimizer.zero_grad()
    return [seen for seen in (*steps, *clips) if seen.gradient and bool(seen.gradient[0].any())]


def _candidate(call: Call, given: list[Tensor]) -> _Seen | None:
    """Return a call that cuts its argument to a range, or has fewer values than it.

    A product with labels of 0 and 1 cuts those entries that happen to fit them, and is none.
    """
    made = call.result
    if not isinstance(made, Tensor) or not made.requires_grad or made.numel() < 2:
        return None
    x = next((x for x in given if x.requires_grad and x.shape == made.shape), None)
    if x is None or x is made or made.is_complex() or x.is_complex() or call.name in MULTIPLIES:
        return None
    ends = _clipped(x, made) if made.numel() >= FEWEST else None
    values = [len(torch.unique(a.detach().flatten()[:SAMPLED])) for a in (made, x)]
    if ends is None and values[0] >= values[1]:
        return None
    return _Seen(call, x, x.detach().clone(), ends)


def _clipped(x: Tensor, made: Tensor) -> tuple[float, float] | None:
    """Return the ends of the range to which entries are cut; None: more than that is done."""
    low, high = (float(end) for end in torch.aminmax(made.detach()))
    if low == high:  # all entries are outside, on the same side
        return (low, high) if bool((x < low).all() or (x > high).all()) else None
    is_cut = torch.equal(made.detach(), x.detach().clamp(low, high))
    return (low, high) if is_cut and not torch.equal(made, x) else None


def _is_clip(seen: _Seen) -> bool:
    """Return whether entries are cut to a range. If all are the same, other arguments tell."""
    if seen.ends is None:
        return False
    low, high = seen.ends
    return low < high or any(bool((_again(seen, by)[0] != low).any()) for by in (-1.0, *SCALES))


def _is_step(seen: _Seen) -> bool:
    """Return whether the function's result varies while its slope is zero, also near zero."""
    if any(bool(g.any()) for g in seen.before):
        return False
    found = [_again(seen, scale) for scale in SCALES]
    flat_everywhere = not any(slope is not None and bool(slope.any()) for _, slope in found)
    return flat_everywhere and any(bool((y != y.flatten()[0]).any()) for y, _ in found)


def _again(seen: _Seen, scale: float) -> tuple[Tensor, Tensor | None]:
    """Return the function's result for its argument times a factor, and its slope there."""
    x = (scale * seen.argument).requires_grad_()
    with seeded(0):
        made = seen.call.function(
            *(x if a is seen.given else a for a in seen.call.args),
            **{name: x if a is seen.given else a for name, a in seen.call.kwargs.items()},
        )
    weights = torch.linspace(1, 2, made.numel(), dtype=made.dtype, device=made.device)
    (slope,) = torch.autograd.grad((made.flatten() * weights).sum(), x, allow_unused=True)
    return made.detach(), slope


# The places of the outputs that have a gradient

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
        self.handle = fork.model.register_forward_hook(self._note, with_kwargs=True)

    def _note(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        made = [x for x in tensors(output) if x.is_floating_point() and x.requires_grad]
        for x in made:
            x.retain_grad()
        self.made += made
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
            share = 0.0 if found is None else self._share(found)
            if share > 0:
                return (Fact("", {"share": share}, {"shape": str(tuple(x.shape))}),)
        return ()

    def _share(self, found: Padding) -> float:
        """Return the share of padding in the places with a gradient; 0 if most has none."""
        counts = self.at(found.places)
        if counts is None or not float(counts[found.inside].float().mean()) > COUNTS:
            return 0.0
        size, length = found.places.shape
        known = [y.reshape(size, length, -1)[found.inside] for y in self.targets
                 if y.numel() % (size * length) == 0]  # fmt: skip
        # Negative classes are ignored ones, such as the last place of labels that were shifted.
        known = [y if y.is_floating_point() else y[y >= 0] for y in known]
        is_alike = any(len(y) and bool((y == y[0]).all()) for y in known)
        return float((counts & found.places).sum() / counts.sum()) if is_alike else 0.0


def padding(x: Tensor) -> Padding | None:
    """Return the padding of tokens (B, T), or of vectors (B, T, F); None: there is none.

    Tokens of padding are those of most rows' last, or first, place; vectors are zero.
    """
    if x.ndim not in (2, 3) or x.is_complex() or x.dtype == torch.bool or min(x.shape) < 2:
        return None
    if x.ndim == 3:
        candidates = [(x == 0).all(-1)]
    elif not x.is_floating_point() and int(x.max()) > 1:  # up to 1: a mask
        candidates = [x == x[:, end].mode().values for end in (-1, 0)]
    else:
        return None
    for places in candidates:
        counts = places.sum(1)
        long = float((counts >= 2).float().mean()) >= ROWS
        for step in (1, -1):  # from the real places to the padding
            before = places.roll(step, 1)
            before[:, 0 if step == 1 else -1] = False
            shortest, longest = int(counts.min()), int(counts.max())
            filled = shortest < longest or MOST * x.shape[1] < longest < x.shape[1]
            if long and filled and not bool((before & ~places).any()):
                return Padding(places, places & before)
    return None


@asks("class-untaught")
def class_untaught(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return classes of which no label's place has a gradient, before and after training.

    Of the labels of other classes, more than half have one before training: what is learnt needs
    none. There may be a label for each sample, token or pixel. Classes at the ends of rows are
    padding, and one of most tokens marks those without a label.
    """
    labels: list[Tensor] = []
    taught: list[Tensor] = []
    inside: list[Tensor] = []
    count = min(CLASS_BATCHES, len(setup.batches))
    for fork in (setup.fork(), setup.fork_like(trained)):
        for i in range(count):
            batch = setup.batches[i * len(setup.batches) // count]
            seen = _Outputs(fork)
            with torch.enable_grad():
                see_calls(fork, seen.see, batch).backward()  # type: ignore[no-untyped-call]
            seen.handle.remove()
            fork.optimizer.zero_grad()
            found = _labels(fork, batch, seen)
            if found is None or not bool((found == found.round()).all()):
                raise Untold("no class for each sample")
            has_gradient = seen.at(found)
            if has_gradient is None:
                raise Untold("no output has a part for each sample")
            labels.append(found.flatten().double().cpu())
            taught.append(has_gradient.flatten().cpu())
            inside.append(_inside(found, size_of(batch)).double().cpu())
            still = _without_gradient(torch.cat(labels), torch.cat(taught))
            if not len(still):
                return ()
    every, first_labels = torch.cat(labels), torch.cat(labels[:count])
    others = (first_labels >= 0) & ~torch.isin(first_labels, still)
    known = torch.cat(taught[:count])[others]
    if not len(known) or not float(known.float().mean()) > TAUGHT:
        return ()
    is_one, of = bool((first_labels[others] == first_labels[others][0]).all()), len(first_labels)
    within = still[torch.isin(still, torch.cat(inside))].tolist()
    numbers = {c: float((every == c).sum()) / 2 for c in within}
    several = len(first_labels) > sum(size_of(setup.batches[i]) for i in range(count))
    return tuple(
        Fact("", {"class": c, "samples": n, "of": float(of)}) for c, n in numbers.items()
        if n >= SAMPLES and (is_one or not several or n <= of / 2)
    )  # fmt: skip


def _labels(fork: Fork, batch: Any, seen: _Outputs) -> Tensor | None:
    """Return the last whole numbers that are given to a loss function for more than each sample.

    If there are none, return the last tensor with one number for each sample, or with one for each
    place, that is no weight and no input. Without its weights, a loss is zero, or the ratio of two
    zeros.
    """
    size = size_of(batch)

    def for_places(x: Tensor) -> bool:
        return not x.is_floating_point() and x.numel() > size and seen.at(x) is not None

    def is_given(x: Tensor) -> bool:
        return any(x.shape == y.shape and torch.equal(x, y) for y in seen.given)

    if targets := [y for y in seen.targets if for_places(y)]:
        return targets[-1]
    found = [
        x for x in tensors(batch)
        if x.ndim and (len(x) == x.numel() == size > 1
                       or (x.ndim > 1 and for_places(x) and not is_given(x)))
    ]  # fmt: skip
    if len(found) < 2:
        return found[-1] if found else None
    loss = RepeatedLoss(fork)
    for x in reversed(found):
        value = loss.of(mapped(batch, lambda y: torch.zeros_like(y) if y is x else y))  # noqa: B023
        if not (value == 0 or math.isnan(value)):
            return x
    return None


def _without_gradient(labels: Tensor, taught: Tensor) -> Tensor:
    """Return the classes of which no label has a gradient; negative labels are of no class."""
    classes: Tensor = torch.unique(labels[labels >= 0])
    return classes[~torch.isin(classes, labels[taught])]


def _inside(labels: Tensor, size: int) -> Tensor:
    """Return the labels without those that fill rows, or columns, of (B, T) at their ends."""
    if labels.ndim == 1 and labels.numel() > size:
        labels = labels.reshape(size if labels.numel() % size == 0 else 1, -1)
    if labels.ndim != 2 or min(labels.shape) < 2:
        return labels.flatten()
    is_end = torch.zeros_like(labels, dtype=torch.bool)
    for axis in (0, 1):
        is_end |= _first_run(labels, axis) | _first_run(labels.flip(axis), axis).flip(axis)
    return labels[~is_end]


def _first_run(x: Tensor, axis: int) -> Tensor:
    """Return which entries equal all entries before them along an axis."""
    return (x == x.narrow(axis, 0, 1)).int().cummin(axis).values.bool()
