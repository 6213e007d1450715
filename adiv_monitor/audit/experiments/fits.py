"""Do targets fit what the model knows of their own place, or of another? Are they drawn anew?"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import combinations, product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from adiv_monitor.audit.experiments.calls import Call, Change, calls_of, see_calls
from adiv_monitor.audit.experiments.changed_inputs import arguments, change_inputs, still
from adiv_monitor.audit.experiments.loss_inputs import (
    CLASSIFIES,
    DIFFERENCES,
    LOSSES,
    outputs_and_targets,
)
from adiv_monitor.audit.experiments.questions import Untold, asks
from adiv_monitor.audit.experiments.state import last_maps
from adiv_monitor.audit.training.batches import size_of, tensors
from adiv_monitor.audit.training.setup import Fork, Setup, seeded
from adiv_monitor.diagnosis.record import Fact

BATCHES, FEW_BATCHES, ENOUGH = 16, 4, 32  # most batches; of costly steps; fewest samples in them
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
        for output, target in outputs_and_targets(call) if is_loss and call.name in COMPARE else ():
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
    most = FEW_BATCHES if setup.is_costly else BATCHES
    given = list({id(batch): batch for batch in setup.batches}.values())[:most]
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
    yield Best(), torch.clone
    yield Best(move="taken from the batch before", by=1, batch=1), torch.clone
    yield Best(move="taken from the batch behind", by=1, batch=-1), torch.clone
    for a, length in enumerate(places):
        if length > 2:
            of = f"along axis {a}" if a else "along the samples"
            yield Best(move=f"reversed {of}", axis=a), partial(torch.flip, dims=(a,))
            for by in SHIFTS:
                shift = Best(move=f"shifted by {by} {of}", axis=a, by=by)
                yield shift, partial(torch.roll, shifts=by, dims=a)
    for a, b in combinations(range(len(places)), 2):
        of, axis = f"axes {a} and {b}", b if a else 0
        yield Best(move=f"{of} transposed", axis=axis), partial(_exchanged, a=a, b=b)
        for k in (1, 2, 3) if a and places[a] == places[b] else ():
            turned = Best(move=f"{of} turned by {90 * k}°", axis=axis)
            yield turned, partial(torch.rot90, k=k, dims=(a, b))


def _exchanged(y: Tensor, a: int, b: int) -> Tensor:
    """Return the entries in the order of two axes exchanged, and in their own shape."""
    order = [*y.shape]
    order[a], order[b] = order[b], order[a]
    return y.reshape(order).transpose(a, b)


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
    pairs = ((x, y) for x, y in zip(*both, strict=True) if x.ndim > axis + 1)
    return not all(torch.equal(x.select(axis, 0), y.select(axis, 0)) for x, y in pairs)


# Are they drawn anew?

DRAWS = ("rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm",
         "normal", "uniform", "random", "bernoulli", "multinomial", "poisson",
         "exponential")  # fmt: skip
NORMAL = ("randn", "randn_like", "normal")
MOST_DRAWS = 6


@asks("labels-unrelated")
def drawn_anew(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return the share of targets that hang on random numbers, and that of what modules get.

    A call draws other numbers, and the rest of the loss the same: if targets change, but nothing
    that a module gets, the model can't know them, and hardly if it changes little. The shares are
    of the mean square. Other numbers than normal ones may choose what is hidden.
    """
    batch = setup.batches[0]
    own, gets = _drawn(setup, None)
    for call in calls_of(setup.fork(), lambda call: call.name in DRAWS, batch)[:MOST_DRAWS]:
        others, also = _drawn(setup, call.number)
        held = next(filter(None, map(_changed, gets, also)), 0.0)
        if (held and call.name not in NORMAL) or len(own) != len(others):
            continue
        for x, y in zip(own, others, strict=True):
            one, two = _numbers(x, x.shape[:1]), _numbers(y, x.shape[:1])
            if one is not None and two is not None and (share := _changed(one, two)):
                yield Fact(call.place, {"share": share, "held": held})


def _changed(one: Tensor, two: Tensor) -> float:
    """Return the share of the mean square that differs; 1 for independent numbers of mean 0."""
    if torch.equal(one, two):
        return 0.0
    return float((one - two).square().sum() / (one.square().sum() + two.square().sum()))


def _drawn(setup: Setup, number: int | None) -> tuple[list[Tensor], list[Tensor]]:
    """Return targets, and what modules get, where a call draws other numbers."""
    fork, gets = still(setup.fork()), list[Tensor]()

    def note(module: nn.Module, args: Any) -> None:
        gets.extend(tensors(args))  # a function of torch's would be a call with a number

    def change(call: Call) -> Any:
        if call.number != number:
            return NotImplemented
        call.function(*call.args, **call.kwargs)  # later calls draw what they drew before
        with seeded(setup.seed + 1):
            return call.function(*call.args, **call.kwargs)

    for module in fork.model.modules():
        module.register_forward_pre_hook(note)
    own = compared_in(fork, setup.batches[0], change=change)[0]
    return own, [x.detach().double() for x in gets]
