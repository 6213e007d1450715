"""Are a module's outputs, and with them the model's, the same for all samples?"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from adiv_monitor.audit.experiments.calls import Call, change_calls
from adiv_monitor.audit.experiments.dropout import rate_of, with_rate
from adiv_monitor.audit.experiments.questions import Untold, asks
from adiv_monitor.audit.training.batches import copied, size_of, tensors
from adiv_monitor.audit.training.setup import Fork, Setup, seeded
from adiv_monitor.diagnosis.record import Fact

VARIES = 1e-4  # share of the mean square, from which inputs vary over samples
CONSTANT = 1e-6  # share below which outputs do not
ROUNDING = 1e-9  # share of the inputs' variance: what is left of x − x in single precision


@asks("outputs-constant")
def ask(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return the first leaf module whose outputs no longer vary over samples, at the start.

    The variance over samples is compared with the mean square, both summed over all entries of a
    sample. Its inputs vary, and the outputs of the model do not. Dropout is left out. A last layer
    whose weights are zero begins with constant outputs on purpose.
    """
    fork = setup.fork()
    change_calls(fork, lambda call: with_rate(call, 0.0) if _drops(call) else NotImplemented)
    batch = copied(fork.batches[0])
    size = size_of(batch)
    if size < 3:
        raise Untold("the batch has fewer than three samples")
    inputs: dict[nn.Module, tuple[float, float]] = {}
    positive: dict[nn.Module, bool] = {}
    found: list[Fact] = []
    outputs: list[tuple[float, float]] = []
    last: list[nn.Module] = []

    def before(module: nn.Module, args: Any) -> None:
        inputs.pop(module, None)
        if known := next(_spreads(args[:1], size), None):
            inputs[module] = known
            positive[module] = bool((args[0] > 0).any())

    def after(path: str, module: nn.Module, output: Any) -> None:
        if any(True for _ in module.parameters()):
            last[:] = [module]
        given, made = inputs.get(module), next(_spreads(output, size), None)
        if made is None or given is None:
            return
        (variance, square), (given_variance, given_square) = made, given
        least = ROUNDING * min(given_variance, 1.0)
        if variance > max(CONSTANT * square, ROUNDING):
            found.clear()  # a later sum varies again
        elif given_variance > VARIES * given_square and (
            variance < CONSTANT * square or variance <= least
        ):
            by = _by(module, square)
            if by == "zeros" and positive[module]:
                return  # it ignores its input, which `input-ignored` tells
            words = {"class": type(module).__name__, "by": by}
            share = min(variance / square, variance / given_variance) if square else 0.0
            found.append(Fact(path, {"share": share}, words))

    for path, module in fork.model.named_modules():
        if path and not any(True for _ in module.children()):
            module.register_forward_pre_hook(before)
            module.register_forward_hook(lambda m, _, output, path=path: after(path, m, output))
    fork.model.register_forward_hook(lambda m, _, output: outputs.extend(_spreads(output, size)))
    with seeded(fork.seed), torch.no_grad():
        fork.loss(fork.model, batch)
    is_constant = outputs and all(v <= CONSTANT * square for v, square in outputs)
    if not is_constant or (last and _is_zero(last[0])):
        return ()
    return tuple(found[:1])


def _drops(call: Call) -> bool:
    return rate_of(call) > 0.0


def _spreads(x: Any, size: int) -> Iterator[tuple[float, float]]:
    """Yield the variance over samples and the mean square of each tensor that has all samples."""
    for each in tensors(x):
        if each.is_floating_point() and each.ndim and len(each) == size and each.numel():
            y: Tensor = each.detach().double()
            yield float(y.var(0, correction=0).mean()), float(y.square().mean())


def _by(module: nn.Module, square: float) -> str:
    """Return what makes the outputs constant, as far as the module itself tells."""
    if _is_zero(module):
        return "weight"
    if "Norm" in type(module).__name__:
        return "norm"
    return "zeros" if square == 0.0 else ""


def _is_zero(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and not weight.any()
