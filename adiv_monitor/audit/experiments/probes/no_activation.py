"""Is the result of an activation function lost, or the model an affine function of its input?"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from adiv_monitor.audit.experiments.backward import nodes_of
from adiv_monitor.audit.experiments.calls import Call, see_calls
from adiv_monitor.audit.experiments.changed_inputs import ChangedInputs, still
from adiv_monitor.audit.experiments.flat import ends_of_function
from adiv_monitor.audit.experiments.questions import asks
from adiv_monitor.audit.training.samples import first
from adiv_monitor.audit.training.setup import Fork, Setup, seeded
from adiv_monitor.diagnosis.record import Fact

SAMPLES = 12  # most samples of a batch
LEAST = 4  # samples: of fewer, some sums are samples themselves
_SAME = 1e-4  # share of the outputs' spread: rounding in a network of many layers
MAPS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@asks("no-activation")
def ask(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Report lost results of activation functions, and a model of several maps that is affine."""
    facts = lost(setup.fork())
    layers = maps_that_run(setup.fork())
    fork = switched_on(still(setup.fork()))
    if len(layers) > 1 and is_affine(fork, first(setup.batches[0], SAMPLES)):
        facts.append(Fact("", {"layers": float(len(layers))}, {"by": "affine"}))
    return tuple(facts)


@torch.no_grad()
def switched_on(fork: Fork) -> Fork:
    """Move gains, biases and weights that are zero, so that no branch is multiplied by next to 0.

    Residual branches may begin so (ReZero, LayerScale, a last layer of zeros). An affine model
    stays affine whatever its weights are.
    """
    with seeded(fork.seed):
        for p in fork.model.parameters():
            if p.is_floating_point() and (p.ndim < 2 or p.squeeze().ndim < 2 or not p.any()):
                p.add_(torch.randn_like(p), alpha=0.3)
    return fork


def lost(fork: Fork) -> list[Fact]:
    """Return the activation functions whose results no other function uses, nor the loss.

    A custom function, whose call is not seen, shows in the graph of the loss.
    """
    made: dict[int, tuple[Call, Tensor]] = {}  # tensors are held so that ids stay unique
    used: set[int] = set()

    def look(call: Call) -> None:
        used.update(id(x) for x in _flat([*call.args, *call.kwargs.values()]))
        x, given = call.result, call.argument(0, "input")
        known = ends_of_function(call.name, call.kwargs) is not None
        is_new = isinstance(x, Tensor) and x is not given and x.requires_grad
        if known and is_new and call.path is not None:
            made[id(x)] = call, x

    given_out: list[Tensor] = []
    fork.model.register_forward_hook(lambda module, args, out: given_out.extend(_flat([out])))
    with torch.enable_grad():
        loss = see_calls(fork, look)
    used.update(map(id, given_out))
    reached = nodes_of([loss.grad_fn])
    calls = [call for key, (call, x) in made.items() if key not in used | {id(loss)}
             and x.grad_fn not in reached]  # fmt: skip
    return [*{c.place: Fact(c.place, {}, {"by": "lost"}) for c in calls}.values()]


def maps_that_run(fork: Fork) -> list[str]:
    """Return the paths of the linear and convolutional layers that the loss runs."""
    found: dict[str, None] = {}
    for path, module in fork.model.named_modules():
        if isinstance(module, MAPS):
            module.register_forward_hook(lambda m, args, out, path=path: found.setdefault(path))
    with torch.no_grad():
        see_calls(fork, lambda call: None)
    return list(found)


def is_affine(fork: Fork, batch: Any) -> bool:
    """Return whether f(a + b − c) = f(a) + f(b) − f(c) for samples a, b and c of a batch.

    It is False if the model has not exactly one input, of floating-point numbers.
    """
    probe = ChangedInputs(fork, batch)
    if len(probe.inputs) != 1 or not probe.inputs[0].is_floating_point() or not probe.own:
        return False

    def mixed(x: Tensor) -> Tensor:
        return x + x.roll(1, 0) - x.roll(2, 0)

    size = len(probe.inputs[0])
    if size < LEAST or bool((probe.inputs[0] == probe.inputs[0][:1]).all()):
        return False
    pairs = [(mixed(x), y) for x, y in zip(probe.own, probe.outputs(0, mixed), strict=True)
             if x.ndim and len(x) == size]  # fmt: skip
    spread = [float((x - x.mean(0)).norm()) for x, _ in pairs]
    return bool(pairs) and all(
        s > _SAME * float(x.norm()) and float((x - y).norm()) <= _SAME * s
        for (x, y), s in zip(pairs, spread, strict=True)
    )


def _flat(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = list(values.values())
    return [x for v in values for x in _flat(v)] if isinstance(values, (list, tuple)) else []
