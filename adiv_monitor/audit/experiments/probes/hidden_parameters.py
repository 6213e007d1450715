"""Does the forward pass use parameters that the model does not register?"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from adiv_monitor.audit.experiments.calls import Call, see_calls
from adiv_monitor.audit.experiments.questions import asks
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.audit.training.train import held
from adiv_monitor.diagnosis.record import Fact


@asks("hidden-parameters")
def ask(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return leaves that get a gradient and stay in an attribute that torch does not search.

    Also return the places where a parameter is used that each forward pass makes anew.
    """
    fork = setup.fork()
    found = hidden(fork)
    known = sum(p.numel() for p in fork.model.parameters())
    every = known + sum(p.numel() for p in found.values())
    facts = [
        Fact(name, {"share": p.numel() / every}, {"shape": str(tuple(p.shape))})
        for name, p in found.items()
    ]
    anew = {place: Fact(place, {"share": p.numel() / (known + p.numel())}, {"made": "anew"})
            for place, p in made_anew(setup.fork())}  # fmt: skip
    return (*facts, *anew.values())


def hidden(fork: Fork) -> dict[str, Tensor]:
    """Return attribute name → tensor with a gradient that neither model nor optimizer holds.

    The tensor must lie in an attribute of one of the model's modules and get a gradient in two
    passes: inputs that require gradients are new tensors in each pass.
    """
    own = {id(p) for p in (*fork.model.parameters(), *held(fork.optimizer))}
    reached = [{id(x): x for x in _leaves(fork)} for _ in range(2)]
    lives = {key: x for key, x in reached[0].items() if key in reached[1] and key not in own}
    found: dict[str, Tensor] = {}
    for path, module in fork.model.named_modules():
        for name, x in _inside(vars(module)):
            if id(x) in lives and not any(x is other for other in found.values()):
                found[f"{path}.{name}".lstrip(".")] = x
    return found


def made_anew(fork: Fork) -> list[tuple[str, Tensor]]:
    """Return place → parameter for those that a second forward pass does not use again."""
    own = {id(p) for p in (*fork.model.parameters(), *held(fork.optimizer))}
    passes: list[dict[int, tuple[str, Tensor]]] = [{}, {}]
    for seen in passes:

        def look(call: Call, seen: dict[int, tuple[str, Tensor]] = seen) -> None:
            made = call.result[0] if isinstance(call.result, tuple) else call.result
            if call.path is None or not isinstance(made, Tensor) or made.is_leaf:
                return
            for _, x in _tensors("", [*call.args, *call.kwargs.values()]):
                if isinstance(x, nn.Parameter) and x.requires_grad and id(x) not in own:
                    seen.setdefault(id(x), (call.place, x))

        with torch.enable_grad():
            see_calls(fork, look)
    return [used for key, used in passes[1].items() if key not in passes[0]]


def _leaves(fork: Fork) -> Iterator[Tensor]:
    """Return the tensors at which the backward pass of a batch's loss ends."""
    with torch.enable_grad():
        loss = fork.first_loss()
    seen, left = set(), [loss.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(x := getattr(node, "variable", None), Tensor):
            yield x
        left += [before for before, _ in node.next_functions]


def _inside(attributes: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in plain attributes by name, also in modules in lists and dictionaries."""
    for name, value in attributes.items():
        if not name.startswith(("_parameters", "_buffers", "_modules")):
            yield from _tensors(name, value)


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, nn.Module):
        yield from ((f"{name}.{inner}", p) for inner, p in value.named_parameters())
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _tensors(f"{name}[{i}]", item)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(f"{name}[{key!r}]", item)
