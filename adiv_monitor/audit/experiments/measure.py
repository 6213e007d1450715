"""Is the loss a measure? Its constant prediction, its fall, and what else its targets depend on."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

from adiv_monitor.audit.experiments.backward import nodes_of
from adiv_monitor.audit.experiments.calls import Call, calls_of, change_calls, given
from adiv_monitor.audit.experiments.changed_inputs import RepeatedLoss, noting
from adiv_monitor.audit.experiments.state import last_maps
from adiv_monitor.audit.training.batches import copied, first, mapped
from adiv_monitor.audit.training.setup import Fork, Setup, seeded

_BATCHES = 4  # number of batches for the loss of a constant prediction


def chance(setup: Setup) -> float | None:
    """Return the loss with the last layers' outputs replaced by zeros; None if it is unknown.

    It is log(classes) for cross-entropy, and the mean square of the targets for squared errors. The
    last layers are the linear and convolutional ones whose outputs no other one takes. It is
    unknown if the outputs then differ between samples: a residual model returns its inputs. Then a
    cross-entropy gets zeros.
    """
    plain, fork = setup.fork(), setup.fork()
    own, without = list[Tensor](), list[Tensor]()
    for model, made in ((plain.model, own), (fork.model, without)):
        model.register_forward_hook(noting(made))
    last, _ = last_maps(plain)
    fork.change_outputs(last, torch.zeros_like)
    try:
        losses = _losses(setup, fork)
    except Exception:  # not every loss takes zeros
        return None
    # Outputs that the last layers do not change are no predictions, such as a code beside them.
    made = [y for x, y in zip(own, without, strict=False) if y.ndim and not torch.equal(x, y)]
    is_constant = all(torch.allclose(y, y[:1].expand_as(y), equal_nan=True) for y in made)
    if not (last and is_constant):
        levelled, fork = list[str](), setup.fork()

        def level(call: Call) -> Any:
            if call.name != "cross_entropy" or not call.args:
                return NotImplemented
            levelled.append(call.place)
            return call.function(torch.zeros_like(call.args[0]), *call.args[1:], **call.kwargs)

        change_calls(fork, level)
        losses = _losses(setup, fork)[: _BATCHES * len(levelled)]
    return fmean(losses) if losses and all(map(math.isfinite, losses)) else None


def _losses(setup: Setup, fork: Fork) -> list[float]:
    with seeded(setup.seed), torch.no_grad():
        return [float(fork.loss(fork.model, copied(x))) for x in setup.batches[:_BATCHES]]


# The loss along its gradient

LARGEST = 100_000_000  # most parameters of a model that is copied in float64
MOST_PARTS = 4  # of a model that are taken for players
SHORT = 1e-6  # length of a step, relative to the weights' length


def descent_share(setup: Setup) -> float | None:
    """Return how much a few samples' loss falls along its gradient, relative to ‖gradient‖².

    (L(θ + hg) − L(θ − hg)) / (2h‖g‖²) with a small h and the same random numbers, in float64. It is
    1 if g is the gradient of the loss. It is less, or below 0, if parts of the loss oppose one
    another, as in the summed loss of a generative adversarial network, each of whose players has
    its own part of the gradient. So the model's parts are moved one by one, and the smallest share
    counts.

    Returns:
        The share; None if it is unknown: the model has one part, or too many for players; it is
        large, or does not run in float64; there is no gradient.
    """
    size = sum(p.numel() for p in setup.model.parameters())
    if not 1 < len(_parts(setup.model)) <= MOST_PARTS or size > LARGEST:
        return None
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # for the random numbers that the loss draws
    try:
        with seeded(setup.seed), torch.enable_grad():
            fork, batch = setup.fork(), first(setup.batches[0], 2)
            fork.model.double()
            batch = mapped(batch, lambda x: x.double() if x.is_floating_point() else x)
            again, loss = RepeatedLoss(fork), fork.loss(fork.model, copied(batch))
            shares = [_share(loss, partial(again.of, batch), p) for p in _parts(fork.model)]
    except Exception:  # the training run reports errors of the loss
        return None
    finally:
        torch.set_default_dtype(before)
    return min((share for share in shares if share is not None), default=None)


def _parts(model: nn.Module) -> list[nn.Module]:
    """Return the model's children that hold parameters; of an only child, its children."""
    parts = [child for child in model.children() if any(True for _ in child.parameters())]
    return _parts(parts[0]) if len(parts) == 1 else parts


def _share(loss: Tensor, again: Callable[[], float], part: nn.Module) -> float | None:
    """Return the share for a short step of a model's part; None: it has no gradient."""
    parameters = [p for p in part.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
    moved = [(p, p.data, g.to_dense())
             for p, g in zip(parameters, found, strict=True) if g is not None]  # fmt: skip
    square = sum(float(g.square().sum()) for *_, g in moved)
    weights = sum(float(here.square().sum()) for _, here, _ in moved)
    if not 0 < square < math.inf:
        return None
    h = SHORT * math.sqrt((weights or 1.0) / square)
    losses = []
    for step in (h, -h):
        for p, here, g in moved:
            p.data = here + step * g
        losses.append(again())
    for p, here, _ in moved:
        p.data = here
    return (losses[0] - losses[1]) / (2 * h * square)


# Targets and samples that change as the network trains


_LOSSES = ("loss", "cross_entropy", "with_logits", "kl_div")  # ends of names of torch's functions
# Functions that draw samples with probabilities, means or rates that a network may compute.
_DRAW = ("multinomial", "bernoulli", "normal", "poisson", "binomial")


def is_maximised(setup: Setup) -> bool:
    """Return whether the optimizer raises what no loss function of torch's computes: a reward."""
    fork = setup.fork()
    raises = any(group.get("maximize") for group in fork.optimizer.param_groups)
    return raises and not calls_of(fork, lambda call: call.name.endswith(_LOSSES))


def moving_targets(setup: Setup, trained: Fork) -> bool:
    """Return whether the loss of the same outputs changes in training, or draws from the network.

    The first batch's loss is computed before and after training. The outputs that the loss learns
    from stay those before training, and so do all weights that it learns from otherwise, such as
    those of a penalty. A loss that still changes has targets that the network makes (TD targets,
    self-distillation) or that a memory holds. It is False if the loss can't be computed this way.
    """
    try:
        after = replace(setup, model=trained.model, loss=trained.loss,
                        optimizer=lambda model: SGD(model.parameters()))  # fmt: skip
        if not all(map(torch.equal, _given(setup), _given(after))):
            return True
        paths, _ = last_maps(setup.fork())
        outputs: list[Tensor] = []

        def keep(output: Tensor) -> Tensor:
            outputs.append(output.clone())
            return outputs[-1]

        loss = _loss(setup.fork(), paths, keep)
        reached = nodes_of([loss.grad_fn])
        kept = [x.detach() if x.requires_grad and x.grad_fn in reached else None for x in outputs]

        def with_kept(fork: Fork) -> Tensor:
            known = iter(kept)
            return _loss(fork, paths, lambda x: (
                x if (y := next(known)) is None else y.clone().requires_grad_()))  # fmt: skip

        fork, last = after.fork(), after.fork()
        changed = with_kept(fork)
        own = {id(getattr(node, "variable", None)) for node in nodes_of([changed.grad_fn])}
        models = (last.model, fork.model, setup.model)
        for p, q, before in zip(*(model.parameters() for model in models), strict=True):
            if id(q) in own:
                p.data = before.detach().clone()
        return not same(loss, changed) and not same(loss, with_kept(last))
    except Exception:  # a loss that differentiates, or weights that are not finite
        return False


def _given(setup: Setup) -> list[Tensor]:
    """Return what functions that draw samples are given in the first batch's loss."""
    calls = calls_of(setup.fork(), lambda call: call.name in _DRAW)
    return [x.detach() for call in calls for x in given(call) if x is not call.result]


def _loss(fork: Fork, paths: Sequence[str], change: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the first loss with the outputs of some modules changed, in order."""
    fork.change_outputs(paths, change)
    return fork.first_loss()


def same(loss: Tensor, other: Tensor | float) -> bool:
    """Return whether two losses are equal up to the order of sums, or one is not finite."""
    exact = 1e-5 if loss.device.type == "cpu" else 1e-3  # other devices may choose other kernels
    one, two = float(loss.detach()), float(torch.as_tensor(other).detach())
    return math.isclose(one, two, rel_tol=exact, abs_tol=1e-7) or not math.isfinite(one + two)


# Networks whose weights only the user's loop updates: teachers and averages of weights (EMA)


def averages(model: nn.Module) -> list[str]:
    """Return the names of the model's parts whose weights equal those of another part.

    The user's loop may update them; the audit's does not.
    """
    found = []
    for path, module in model.named_modules():
        parts = dict(module.named_children())
        for name, part in parts.items():
            if any(_is_copy(part, other) for other in parts.values()):
                found.append(f"{path}.{name}".lstrip("."))
    return found


def _is_copy(some: nn.Module, other: nn.Module) -> bool:
    """Return whether a module is frozen, and another one is trained and has the same weights.

    Those of normalisations begin as ones and zeros, so that two of them are equal without a copy.
    """
    own, others = list(some.parameters()), list(other.parameters())
    is_taught = any(p.requires_grad for p in others) and not any(p.requires_grad for p in own)
    is_drawn = any(bool((p != p.flatten()[:1]).any()) for p in own)
    alike = [p.shape for p in own] == [p.shape for p in others]
    return is_taught and is_drawn and alike and all(map(torch.equal, own, others))
