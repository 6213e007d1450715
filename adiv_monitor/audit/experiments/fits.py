"""Do targets fit what the model knows of their own place, or of another? Are they drawn anew?"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations, product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from adiv_monitor.audit.experiments.calls import Call, Change, calls_of, see_calls
from adiv_monitor.audit.experiments.changed_inputs import (
    arguments,
    change_inputs,
    given_inputs,
    still,
)
from adiv_monitor.audit.experiments.loss_inputs import (
    CLASSIFIES,
    DIFFERENCES,
    LOSSES,
    compared,
    parts_like,
)
from adiv_monitor.audit.experiments.questions import Untold, asks
from adiv_monitor.audit.experiments.state import last_maps
from adiv_monitor.audit.training.batches import size_of, tensors
from adiv_monitor.audit.training.setup import Fork, Setup, seeded
from adiv_monitor.diagnosis.record import Fact

BATCHES, ENOUGH = 16, 32  # most batches, and fewest samples in them
ROWS, MOST = 4096, 1 << 25  # most places, and numbers of layers
NUMBERS, CLASSES = 8, 2048  # most numbers of a target, and codes of classes
PENALTY = 0.01  # times the number of places
SHIFTS = (1, -1, 2, -2, 3, -3)
COPIED = 0.8  # of the targets that an input explains, if they are its values at other places
# A share of the targets that is no chance: more than this, and than this over the samples.
SURE, BY_CHANCE = 0.1, 12.0

COMPARE = (*CLASSIFIES, *DIFFERENCES, "kl_div")

Move = Callable[[Tensor], Tensor]


def compared_in(
    fork: Fork, batch: Any, paths: Sequence[str] = (), change: Change | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the targets that the loss compares with what depends on parameters.

    Also return what some layers get: (samples, places, …, features).
    """
    targets: list[Tensor] = []
    layers: list[Tensor] = []

    def note(module: nn.Module, args: Any) -> None:
        x = args[0].detach().float().cpu().clone()
        layers.append(x if isinstance(module, nn.Linear) else x.movedim(1, -1))

    def see(call: Call) -> None:
        is_loss = call.name in (*CLASSIFIES, *LOSSES) or call.path is None
        for output, target in compared(call) if is_loss and call.name in COMPARE else ():
            if output.requires_grad and target.numel() > 1 and not target.is_complex():
                targets.append(target.detach().cpu().clone())

    hooks = [fork.model.get_submodule(path).register_forward_pre_hook(note) for path in paths]
    with torch.enable_grad():
        see_calls(fork, see, batch, change)
    for hook in hooks:
        hook.remove()
    return targets, layers


# Do they fit better at other places?


class Best(NamedTuple):
    """The move with which targets fit best: their share, its name, and the last axis it concerns.

    A shift is by some places, or batches; other moves are by 0.
    """

    share: float = 0.0
    move: str = ""
    axis: int = 0
    by: int = 0
    batch: int = 0


@asks("targets-moved")
def targets_moved(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return how much of the targets the last layers' inputs explain, as they are and moved.

    They are moved along each axis, and with two axes exchanged; what the layers get is that before,
    and after, training. Targets that are values of the inputs at other places, such as the next
    tokens, are not shifted. The order is "wrong" if no model can restore it, since it does not see
    the places of its targets; "meant" if this one can, or if targets may be later ones.
    """
    given = list({id(batch): batch for batch in setup.batches}.values())[:BATCHES]
    batches = [batch for batch in given if size_of(batch) == size_of(given[0])]
    paths, _ = last_maps(setup.fork())
    if len(batches) * size_of(given[0]) < ENOUGH or not paths:
        raise Untold("too few samples, or no layer from which the loss is computed")
    own, best, each = 0.0, Best(), list[tuple[list[Tensor], list[Tensor]]]()
    for fork in (setup.fork(), setup.fork_like(trained)):
        each.clear()
        for batch in batches:
            if sum(x.numel() for _, layers in each for x in layers) < MOST:
                each.append(compared_in(still(fork), batch, paths))
        inputs = [[*tensors(arguments(fork, batch))] for batch in batches[: len(each)]]
        of_targets, of_layers = (zip(*parts, strict=False) for parts in zip(*each, strict=True))
        for layer, targets in product(of_layers, of_targets):
            found = _shares(layer, targets, inputs)
            own = max([own, *(x.share for x in found[:1])])
            best = max([best, *found[1:]])
    if best.share > SURE + 2 * BY_CHANCE / (len(each) * size_of(given[0])):
        order = "unclear" if best.axis == 0 and best.by else "wrong"
        if best.axis and (best.by or _sees(setup, paths, best.axis)):
            order = "meant"
        yield Fact("", {"own": own, "best": best.share}, {"move": best.move, "order": order})
    if 2 * own > best.share:  # else all targets are, not some
        yield from _flipped(setup, given)


def _shares(
    layers: Sequence[Tensor], targets: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]]
) -> list[Best]:
    """Return the share of targets that a layer explains, as they are and by each move.

    []: they do not have the layer's places.
    """
    places = layers[0].shape[:-1]
    found = [_numbers(y, places) for y in targets if {x.shape for x in layers} == {layers[0].shape}]
    y = [part for part in found if part is not None]
    if not y or len(y) < len(layers) or len({part.shape for part in y}) > 1:
        return []
    copies = {axis for axis in range(1, len(places)) if _are_inputs(y, inputs, axis)}
    moves = [x for x in _moves(places) if not (x[0].by and x[0].axis in copies)]
    moved = (torch.cat([move(part) for part in torch.stack(y).roll(best.batch, 0)])
             for best, move in moves)  # fmt: skip
    shares = _explained(torch.cat([*layers]), moved)
    return [best._replace(share=x) for x, (best, _) in zip(shares, moves, strict=True)]


def _numbers(x: Tensor, places: Sequence[int]) -> Tensor | None:
    """Return a tensor's numbers at each place, few of them; None: it does not have these places.

    A class has a code of random numbers, and an ignored one zeros.
    """
    x, chance = x.cpu(), torch.Generator().manual_seed(0)
    if not x.is_floating_point():
        codes = torch.randn(CLASSES, NUMBERS, generator=chance)
        x = codes[x.long() % CLASSES] * (x >= 0)[..., None]
    elif x.shape[2:] == (*places[1:],) != x.shape[1:-1]:  # channels are before rows and columns
        x = x.movedim(1, -1)
    if x.numel() % math.prod(places) or not x.numel():
        return None
    x = x.reshape(*places, -1).float()
    few = x.shape[-1] <= NUMBERS
    return x if few else x @ torch.randn(x.shape[-1], NUMBERS, generator=chance)


def _moves(places: Sequence[int]) -> Iterator[tuple[Best, Move]]:
    """Yield ways to move targets, the first of which leaves them where they are."""

    def exchanged(y: Tensor, a: int, b: int) -> Tensor:
        order = [*y.shape]
        order[a], order[b] = order[b], order[a]
        return y.reshape(order).transpose(a, b)

    yield Best(), lambda y: y
    yield Best(move="taken from the batch before", by=1, batch=1), lambda y: y
    yield Best(move="taken from the batch behind", by=1, batch=-1), lambda y: y
    for a, length in enumerate(places):
        if length > 2:
            of = f"along axis {a}" if a else "along the samples"
            yield Best(move=f"reversed {of}", axis=a), lambda y, a=a: y.flip(a)
            for by in SHIFTS:
                shift = Best(move=f"shifted by {by} {of}", axis=a, by=by)
                yield shift, lambda y, a=a, by=by: y.roll(by, a)
    for a, b in combinations(range(len(places)), 2):
        of, axis = f"axes {a} and {b}", b if a else 0
        yield Best(move=f"{of} transposed", axis=axis), lambda y, a=a, b=b: exchanged(y, a, b)
        for k in (1, 2, 3) if a and places[a] == places[b] else ():
            turned = Best(move=f"{of} turned by {90 * k}°", axis=axis)
            yield turned, lambda y, a=a, b=b, k=k: y.rot90(k, (a, b))


def _are_inputs(y: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], axis: int) -> bool:
    """Return whether targets are values of an input, at the same places or a few further on."""
    of, shifts = torch.cat([*y]), (0, *SHIFTS)
    kept = [COPIED * (1 - abs(by) / of.shape[axis]) for by in shifts]  # others come from the end
    for parts in zip(*inputs, strict=False):
        x = [z for z in (_numbers(part, y[0].shape[:-1]) for part in parts) if z is not None]
        if len(x) == len(y):
            shares = _explained(torch.cat(x), (of.roll(by, axis) for by in shifts))
            if any(share > most for share, most in zip(shares, kept, strict=True)):
                return True
    return False


def _explained(x: Tensor, targets: Iterable[Tensor]) -> list[float]:
    """Return the share of each of several targets that a linear map of x explains.

    Both are (samples, places, …, numbers). The map is fitted to every other sample, and judged by
    the rest. What all samples have in common at a place does not count.
    """
    count = x[..., 0].numel()
    rows = torch.randperm(count, generator=torch.Generator().manual_seed(0))[:ROWS]
    test = rows // (count // len(x)) % 2 > 0

    def chosen(z: Tensor) -> Tensor:
        return (z - z.mean(0)).flatten(0, -2)[rows].double()

    known = chosen(x)
    known = known / known.std(0).clamp(min=1e-12)
    fit, shares = known[~test], list[float]()
    ridge = PENALTY * len(fit) * torch.eye(fit.shape[1], dtype=torch.double)
    solved = torch.linalg.solve(fit.T @ fit + ridge, fit.T)
    for z in map(chosen, targets):
        left = z[test] - known[test] @ (solved @ z[~test])
        shares.append(1 - float(left.square().sum() / z[test].square().sum().clamp(min=1e-30)))
    return shares


def _sees(setup: Setup, paths: Sequence[str], axis: int) -> bool:
    """Return whether what the layers get at the first place depends on the input at the last."""

    def other(name: str, x: Tensor) -> Tensor:
        along = axis + (x.ndim == 4)
        if x.ndim <= along:
            return x
        last = x.narrow(along, -1, 1).roll(1, 0)
        return torch.cat([x.narrow(along, 0, x.shape[along] - 1), last], along)

    own, changed, batch = setup.fork(), setup.fork(), setup.batches[0]
    change_inputs(changed.model, other)
    both = (compared_in(still(fork), batch, paths)[1] for fork in (own, changed))
    return any(
        not torch.equal(x.select(axis, 0), y.select(axis, 0))
        for x, y in zip(*both, strict=True)
        if x.ndim > axis + 1
    )


FITS, CLEARLY = 0.3, 0.2  # correlation of an image with its target; its difference to a moved one's


def _flipped(setup: Setup, batches: Sequence[Any]) -> Iterator[Fact]:
    """Yield the share of targets, of those of pixels, that fit their images better if flipped."""
    fork = setup.fork()
    inputs = [[x for x in given_inputs(fork, b).values() if x.ndim == 4] for b in batches]
    if any(len(x) != 1 for x in inputs) or len({x[0].shape[1:] for x in inputs}) > 1:
        return
    x = torch.cat([x[0] for x in inputs]).float().cpu()
    targets = [[*tensors(batch)][-1].float().cpu() for batch in batches]
    fit = all(y.shape[-2:] == x.shape[-2:] for y in targets)
    if not fit or sum(map(torch.numel, targets)) != x[:, 0].numel():
        return
    x, y = torch.cat([x, x.mean(1, keepdim=True)], 1), torch.cat([*targets]).reshape(x[:, 0].shape)
    for axis, move in ((1, "rows-reversed"), (2, "columns-reversed")):
        (own, other), by_chance = ((_of_each(x, z), _of_each(x, z.flip(axis)))
                                   for z in (y, y.roll(1, 0)))  # fmt: skip
        told = ((own - other).abs() > CLEARLY) & (torch.maximum(own, other) > FITS)
        if int(told.sum()) >= max(ENOUGH / 2, 3 * int((torch.maximum(*by_chance) > FITS).sum())):
            yield Fact("", {"share": float((other > own)[told].float().mean())}, {"move": move})


def _of_each(images: Tensor, targets: Tensor) -> Tensor:
    """Return the correlation of each image, in its best channel, with its target, signed alike."""
    x, y = images - images.mean((2, 3), keepdim=True), targets - targets.mean((1, 2), keepdim=True)
    products = (x * y[:, None]).sum((2, 3))
    lengths = (x.square().sum((2, 3)) * y.square().sum((1, 2))[:, None]).sqrt()
    each = products / lengths.clamp(min=1e-30)
    channel = int(each.mean(0).abs().argmax())
    return each[:, channel] * each[:, channel].mean().sign()


# Are they drawn, or numbered, anew?

DRAWS = (
    *("rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm"),
    *("normal", "uniform", "random", "bernoulli", "multinomial", "poisson", "exponential"),
)
MOST_DRAWS, SHUFFLES, SEVERAL = 6, 20, 8  # SEVERAL: fewest batches
_EXACT = 1e-5


@asks("labels-unrelated")
def drawn_anew(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return the share of targets that hang on random numbers alone, or on their own batch.

    A call draws other numbers, and the rest of the loss the same: if targets change, but nothing
    that a module gets, the model can't know them. The share is of the targets' mean square.
    """
    batch = setup.batches[0]
    own, gets = _drawn(setup, None)
    for call in calls_of(setup.fork(), lambda call: call.name in DRAWS, batch)[:MOST_DRAWS]:
        others, also = _drawn(setup, call.number)
        if gets != also or len(own) != len(others):
            continue
        for x, y in zip(own, others, strict=True):
            one, two = _numbers(x, x.shape[:1]), _numbers(y, x.shape[:1])
            if one is not None and two is not None and (share := _share(one, two)) > 0:
                yield Fact(call.place, {"share": share})
    for target in own:
        yield from _by_batch(setup, target)


def _drawn(setup: Setup, number: int | None) -> tuple[list[Tensor], list[float]]:
    """Return targets, and the sums of what modules get, where a call draws other numbers."""
    fork, gets = still(setup.fork()), list[float]()

    def note(module: nn.Module, args: Any) -> None:
        gets.extend(float(x.detach().double().sum()) for x in tensors(args))

    def change(call: Call) -> Any:
        if call.number != number:
            return NotImplemented
        call.function(*call.args, **call.kwargs)  # later calls draw what they drew before
        with seeded(setup.seed + 1):
            return call.function(*call.args, **call.kwargs)

    for module in fork.model.modules():
        module.register_forward_pre_hook(note)
    return compared_in(fork, setup.batches[0], change=change)[0], gets


def _share(x: Tensor, y: Tensor) -> float:
    both = x.square().sum() + y.square().sum()
    return float((x - y).square().sum() / both.clamp(min=1e-30))


def _by_batch(setup: Setup, target: Tensor) -> Iterator[Fact]:
    """Yield what is the same of the samples' targets in all batches, but not in shuffled ones.

    Of classes, a number that all batches have is no sign: episodes have as many.
    """
    batches = list({id(batch): batch for batch in setup.batches}.values())
    parts = [part.detach().cpu().double().flatten() for part in parts_like(target, batches)]
    sizes = [*map(len, parts)]
    if len(parts) < SEVERAL or min(sizes) < 3 or sizes != [*map(size_of, batches)]:
        return
    every, chance = torch.cat(parts), torch.Generator().manual_seed(setup.seed)
    is_class = torch.equal(every, every.round())
    if is_class and len({len(torch.unique(part)) for part in parts}) == 1:
        return

    def is_same(of: Callable[[Tensor], Tensor], of_batches: Sequence[Tensor]) -> bool:
        found = torch.stack([of(part) for part in of_batches])
        return bool((found - found[0]).abs().max() < _EXACT * max(1.0, float(every.std())))

    drawn = [every[torch.randperm(len(every), generator=chance)] for _ in range(SHUFFLES)]
    for name, (is_of_classes, of) in _OF_BATCH.items():
        is_asked = is_of_classes is is_class and is_same(of, parts)
        if is_asked and not any(is_same(of, x.split(sizes)) for x in drawn):
            yield Fact("", {"batches": float(len(parts))}, {"of": name})


# What may be the same → whether it is of classes, and the numbers.
_OF_BATCH: dict[str, tuple[bool, Callable[[Tensor], Tensor]]] = {
    "classes are 0, 1, 2, … without a gap": (
        True,
        lambda y: torch.stack([y.min(), y.max() + 1 - len(torch.unique(y))]),
    ),
    "smallest and largest values are the same": (False, lambda y: torch.stack([*y.aminmax()])),
    "mean and spread are the same": (False, lambda y: torch.stack([y.mean(), y.std()])),
}
