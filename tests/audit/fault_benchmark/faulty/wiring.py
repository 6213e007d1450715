"""Faults of the wiring: unused parts, wrong inputs and targets, values that are not finite."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from audit.fault_benchmark import healthy
from audit.fault_benchmark.run import Run, case
from computes import Computes
from torch import Tensor, nn
from torch.nn import functional

NO_RELATION = "no run can tell labels of other inputs from inputs that say nothing"
FLOORED = "probabilities as logits: the loss can't fall below 1.46, however long it is trained"


def nothing() -> nn.Module:
    """Return a layer with an inverted mask: all outputs are 0."""
    return Computes(lambda m, x: x * 0)


def detached(run: Run) -> None:
    run.model.body = nn.Sequential(run.model.body, Computes(lambda m, x: x.detach()))


def head_only(run: Run) -> None:
    """Give the optimizer the head alone, as for fine-tuning, of an untrained network."""
    run.held = lambda model: model.head.parameters()


def one_missing(position: int) -> Callable[[Run], None]:
    """Hide a part of the body from the optimizer, as if it had been added later."""

    def held(model: nn.Module) -> Iterable[Any]:
        missing = {id(p) for p in model.body[position].parameters()}
        return [p for p in model.parameters() if id(p) not in missing]

    def plant(run: Run) -> None:
        run.held = held

    return plant


def frozen(run: Run) -> None:
    """Freeze an untrained body."""
    run.model.body.requires_grad_(False)
    run.held = lambda model: [p for p in model.parameters() if p.requires_grad]


def ignored(run: Run) -> None:
    run.model.body = nn.Sequential(nothing(), run.model.body)


def embedding_ignored(run: Run) -> None:
    run.model.body.insert(1, nothing())


def shuffled(run: Run) -> None:
    """Shuffle inputs and labels independently."""
    run.batches = [
        (inputs, targets[torch.randperm(len(targets))]) for inputs, targets in run.batches
    ]


def ending(module: Callable[[], nn.Module]) -> Callable[[Run], None]:
    def plant(run: Run) -> None:
        run.model.head = nn.Sequential(run.model.head, module())

    return plant


def logarithm_of_zero(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the cross-entropy of shares that may be zero."""
    inputs, targets = batch
    shares = functional.relu(model(inputs))
    shares = shares / (shares.sum(-1, keepdim=True) + 1e-9)
    sought = functional.one_hot(targets, shares.shape[-1])
    return -(sought * shares.log()).sum(-1).mean()


def root_of_zero(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the distance of each pixel; its gradient is NaN if pixel and output are zero."""
    inputs, targets = batch
    visible = (targets - targets[:1]).abs() > 1e-6
    return ((model(inputs) - targets) * visible).square().sqrt().mean()


def with_loss(loss: Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor]) -> Callable[[Run], None]:
    def plant(run: Run) -> None:
        run.loss = loss

    return plant


def bad_sample(batch: int) -> Callable[[Run], None]:
    """Set one entry of one batch to NaN."""

    def plant(run: Run) -> None:
        inputs = run.batches[batch][0].clone()
        inputs.view(-1)[5] = float("nan")
        run.batches[batch] = (inputs, run.batches[batch][1])

    return plant


def in_half(scale: float) -> Callable[[Run], None]:
    """Compute values in float16 that do not fit in it."""

    def half(layer: nn.Module, x: Tensor) -> Tensor:
        large = (scale * x).half()
        return (large - large.mean(-1, keepdim=True)).float() / scale

    def plant(run: Run) -> None:
        run.model.body = nn.Sequential(run.model.body, Computes(half))

    return plant


UNRELATED = ("labels-unrelated", "loss-stuck", "input-ignored")
FLOOR = ("double-softmax", "cannot-overfit", "loss-stuck")
CUT = "activated-logits"
soft = ending(lambda: nn.Softmax(-1))
cut = ending(nn.ReLU)

CASES = [
    case(healthy.DEEP_TANH, "body detached", detached, "unreached"),
    case(healthy.CNN_SGD, "body detached", detached, "unreached"),
    case(healthy.GPT, "body detached", detached, "unreached"),
    case(healthy.REGRESSION, "optimizer holds the head only", head_only, "not-held"),
    case(healthy.CNN_ADAM, "optimizer holds the head only", head_only, "not-held"),
    case(healthy.VIT, "optimizer holds the head only", head_only, "not-held"),
    case(healthy.MLP_SGD, "optimizer lacks the first layer", one_missing(0), "not-held"),
    case(healthy.REGRESSION, "body frozen", frozen, "frozen"),
    case(healthy.VIT, "body frozen", frozen, "frozen"),
    case(healthy.MLP_ADAM, "inputs × 0 inside", ignored, "input-ignored"),
    case(healthy.CNN_BATCH_NORM, "inputs × 0 inside", ignored, "input-ignored"),
    case(healthy.GPT, "embedding × 0", embedding_ignored, "input-ignored"),
    case(healthy.MLP_ADAM, "labels shuffled", shuffled, *UNRELATED, because=NO_RELATION),
    case(healthy.CNN_SGD, "labels shuffled", shuffled, *UNRELATED, because=NO_RELATION),
    case(healthy.MLP_SGD, "softmax twice", soft, *FLOOR, because=FLOORED, judged_by="error"),
    case(healthy.CNN_SGD, "softmax twice", soft, *FLOOR, because=FLOORED, judged_by="error"),
    case(healthy.MLP_SGD, "ReLU on logits", cut, CUT),
    case(healthy.CNN_ADAM, "ReLU on logits", cut, CUT),
    case(healthy.MLP_ADAM, "log(0)", with_loss(logarithm_of_zero), "non-finite"),
    case(healthy.AUTOENCODER, "gradient of √0", with_loss(root_of_zero), "non-finite"),
    case(healthy.VIT, "float16 overflows", in_half(1e5), "non-finite"),
    case(healthy.CNN_ADAM, "a missing entry in batch 20", bad_sample(20), "non-finite"),
]
