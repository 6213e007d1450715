"""Observation of which parameters and inputs take part in training."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from adiv_monitor.audit.seen.inputs import by_name, changed, is_input, is_list
from adiv_monitor.audit.seen.repeated_loss import RepeatedLoss
from adiv_monitor.audit.training.batches import mapped, size_of, tensors
from adiv_monitor.audit.training.setup import Fork, seeded
from adiv_monitor.audit.training.train import held
from adiv_monitor.diagnosis.record import Wiring
from adiv_monitor.features.rows import to_compute_dtype

LOOKED = 32  # most forward passes that decide on which parameters the loss depends


class Gradients:
    """Records which parameters of a fork receive gradients, and which modules run in which order.

    Attributes:
        ran: Paths of the modules that hold parameters, in the order in which they first ran.
    """

    def __init__(self, fork: Fork) -> None:
        self._fork = fork
        self._named = dict(fork.model.named_parameters())
        self._unreached = {name for name, p in self._named.items() if p.requires_grad}
        self._zero = set(self._unreached)
        self.ran: list[str] = []
        self._handles: dict[str, RemovableHandle] = {
            path: module.register_forward_pre_hook(self._noted(path))
            for path, module in fork.model.named_modules()
            if _holds_any(module)
        }

    def look(self) -> None:
        """Inspect the complete gradients of a step."""
        for name in sorted(self._zero):
            gradient = self._named[name].grad
            if gradient is None:
                continue
            self._unreached.discard(name)
            dense = gradient.coalesce().values() if gradient.is_sparse else gradient
            if bool(dense.any()):
                self._zero.discard(name)

    def remove(self) -> None:
        """Remove the hooks from the modules that never ran."""
        for handle in self._handles.values():
            handle.remove()

    def wiring(self, input_matters: float) -> Wiring:
        """Return the observed wiring, with the given sensitivity to the inputs."""
        held_ones = set(map(id, held(self._fork.optimizer)))
        trainable = {name: p for name, p in self._named.items() if p.requires_grad}
        reached = [name for name in trainable if name not in self._unreached]
        unreached = [name for name in trainable if name in self._unreached]
        return Wiring(
            not_held=tuple(n for n in reached if id(trainable[n]) not in held_ones),
            unreached=tuple(unreached),
            zero_gradient=tuple(n for n in reached if n in self._zero),
            frozen=tuple(n for n, p in self._named.items() if not p.requires_grad),
            input_matters=input_matters,
        )

    def _noted(self, path: str) -> Any:
        def note(module: nn.Module, args: Any) -> None:
            self.ran.append(path)
            self._handles.pop(path).remove()

        return note


def _holds_any(module: nn.Module) -> bool:
    return any(parameter is not None for parameter in module._parameters.values())


def unused(fork: Fork, batch: Any, names: Sequence[str]) -> tuple[str, ...]:
    """Return the parameters, out of `names`, that the loss of a batch does not depend on at all.

    Noise of the parameters' own scale is added to all of them; if the loss changes, to each half of
    them, and so on. Parameters that the limit of passes leaves undecided are not returned.
    """
    loss, parameters = RepeatedLoss(fork), dict(fork.model.named_parameters())
    as_it_is = loss.of(batch)
    found: set[str] = set()
    groups = [list(names)] if names else []
    for _ in range(LOOKED):
        if not groups:
            break
        group = groups.pop(0)
        with _noisy([parameters[name] for name in group], fork.seed):
            is_same = math.isclose(loss.of(batch), as_it_is, rel_tol=1e-6)
        if is_same:
            found.update(group)
        elif len(group) > 1:
            half = len(group) // 2
            groups += [group[:half], group[half:]]
    return tuple(name for name in names if name in found)


@contextmanager
def _noisy(parameters: Sequence[Tensor], seed: int) -> Iterator[None]:
    """Add normal noise to the parameters inside the context, of their own rms but at least 0.1."""
    before = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad(), seeded(seed):
        for parameter in parameters:
            rms = float(parameter.float().square().mean().sqrt())
            parameter.add_(max(rms, 0.1) * torch.randn_like(parameter))
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, values in zip(parameters, before, strict=True):
                parameter.copy_(values)


def input_matters(fork: Fork, batches: list[Any]) -> float:
    """Return how much a model's outputs change when inputs are exchanged between samples.

    ‖f(x) − f(x′)‖ / ‖f(x)‖ over these batches, where x′ are the inputs of the model's forward pass
    moved on by one sample; labels, targets and masks stay. Both passes use the same random numbers.

    Returns:
        The ratio; 0: the model ignores its inputs. NaN if it is unknown: the model's forward pass
        does not run, all samples are alike, or come in a list, something is not finite, or no
        output has a part for each sample, as where the forward pass returns the loss itself.
    """
    exchange = _Exchange(fork.model)
    try:
        for batch in batches:
            exchange.one_batch(RepeatedLoss(fork), batch)
    except Exception:  # a forward pass may reject other samples' inputs
        return math.nan
    finally:
        exchange.remove()
    return exchange.ratio()


class _Exchange:
    """Runs batches with their own and with exchanged inputs and compares the outputs."""

    def __init__(self, model: nn.Module) -> None:
        self._difference = self._length = 0.0
        self._exchanging = False
        self._is_other = False
        self._samples = 0
        self._outputs: list[Tensor] = []
        self._handles = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after),
        ]

    def one_batch(self, loss: RepeatedLoss, batch: Any) -> None:
        """Run a batch with its own and with exchanged inputs, and add up the differences."""
        own = self._run(loss, batch, exchanging=False)
        others = self._run(loss, batch, exchanging=True)
        if not self._is_other:
            return
        for x, y in zip(own, others, strict=True):
            self._difference += float((to_compute_dtype(x) - to_compute_dtype(y)).square().sum())
            self._length += float(to_compute_dtype(x).square().sum())

    def ratio(self) -> float:
        """Return the relative change over all batches."""
        if not 0 < self._length < math.inf:
            return math.nan
        return math.sqrt(self._difference / self._length)

    def remove(self) -> None:
        """Remove the hooks from the model."""
        for handle in self._handles:
            handle.remove()

    def _run(self, loss: RepeatedLoss, batch: Any, *, exchanging: bool) -> list[Tensor]:
        self._exchanging, self._outputs = exchanging, []
        loss.of(batch)
        return self._outputs

    def _before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        given = by_name(module, args, kwargs)
        size = size_of([x for name, x in given.items() if is_input(name)])
        self._samples = size

        def moved_on(x: Tensor) -> Tensor:
            if x.ndim == 0 or len(x) != size:
                return x
            rolled = x.roll(1, 0)
            self._is_other |= not torch.equal(x, rolled)
            return rolled

        def exchanged(name: str, x: Any) -> Any:
            return mapped(x, moved_on) if is_input(name) and not is_list(x) else x

        return changed(module, args, kwargs, exchanged) if self._exchanging else None

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        found = [x.detach() for x in tensors(output) if x.is_floating_point()]
        # Means over the samples are left out, since they do not depend on the order.
        self._outputs += [x.clone() for x in found if x.ndim and x.numel() >= self._samples]
