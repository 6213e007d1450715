"""Faults of public repair sets, rewritten for embedded and generated data.

Sources: dl-fl-repair (Stack Overflow's faults by number, and mutants of DeepCrime), the synthetic
faults of TheDeepChecker, Circle and Blob of DeepDiagnosis, the user-code cases of TrainCheck.
Networks and data are ours, so numbers are comparable in kind only.
"""

from collections.abc import Callable

import torch
from audit.fault_benchmark import healthy
from audit.fault_benchmark.data import minibatches
from audit.fault_benchmark.faulty.initial import ALIKE, SYMMETRIC, constant
from audit.fault_benchmark.faulty.inputs import scaled
from audit.fault_benchmark.faulty.optimizers import with_algorithm
from audit.fault_benchmark.faulty.rates import times
from audit.fault_benchmark.faulty.wiring import NO_RELATION, UNRELATED, shuffled
from audit.fault_benchmark.networks import layers, mlp
from audit.fault_benchmark.run import Healthy, Run, case
from computes import Computes
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adadelta, Adam

ONE_OUTPUT = "a softmax over one output is 1: the loss neither depends on inputs nor on weights"


def binary(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return functional.binary_cross_entropy_with_logits(model(inputs).squeeze(1), targets)


def of_probabilities(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return functional.binary_cross_entropy(model(inputs).squeeze(1), targets)


def _ones_and_zeros() -> Run:
    """Return a run on noisy rows of ones or zeros; one label in ten is wrong."""
    labels = torch.randint(2, (1024,)).float()
    rows = (labels[:, None] * torch.ones(20) - 0.5) + 0.3 * torch.randn(1024, 20)
    labels = (labels - (torch.rand(1024) < 0.1).float()).abs()
    model = mlp([20, 32, 32, 1], nn.Tanh)
    return Run(model, minibatches(2 * rows, labels, 32), binary, SGD, {"lr": 0.3})


ONES_AND_ZEROS = Healthy("ones-and-zeros-sgd", "MLP", _ones_and_zeros)


def softmax_over_one(run: Run) -> None:
    run.model.head = nn.Sequential(run.model.head, nn.Softmax(1))
    run.loss = of_probabilities


def penalised(weight: float, power: int) -> Callable[[Run], None]:
    def plant(run: Run) -> None:
        loss = run.loss

        def with_penalty(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            size = sum(layer.weight.abs().pow(power).sum() for layer in layers(model))
            return loss(model, batch) + weight * size

        run.loss = with_penalty

    return plant


def exponential() -> nn.Module:
    return Computes(lambda m, x: x.exp())


def with_activation(make: Callable[[], nn.Module]) -> Callable[[Run], None]:
    """Replace each ReLU."""

    def plant(run: Run) -> None:
        for name, module in list(run.model.body.named_children()):
            if isinstance(module, nn.ReLU | nn.Tanh):
                setattr(run.model.body, name, make())

    return plant


def sigmoid_output(run: Run) -> None:
    """Add a sigmoid output, and scale targets far outside its range."""
    run.model.head = nn.Sequential(run.model.head, nn.Sigmoid())
    run.batches = [(inputs, 30 * targets) for inputs, targets in run.batches]


def scaled_targets(run: Run) -> None:
    run.batches = [(inputs, 1000 * targets) for inputs, targets in run.batches]


def holds_frozen(run: Run) -> None:
    """Freeze the body, and give the optimizer the body alone."""
    run.model.body.requires_grad_(False)
    run.held = lambda model: model.body.parameters()


def wide_normal(run: Run) -> None:
    with torch.no_grad():
        for layer in layers(run.model):
            layer.weight.normal_()


CONSTANT = ("softmax-of-one", "input-ignored", "unreached", "cannot-overfit")
SCALES = ("exploding", "bad-initialisation")
TOO_WIDE = "the initial scale of the weights is what makes the signal grow"
OUTPUTS = ("saturated-units", "cannot-overfit", "loss-stuck", "dead-units")
OUT_OF_REACH = "targets lie where a sigmoid can't come, and the head saturates on the way to them"
ALL_ONE = "weights that are all 1 are alike, and lie on one side of zero"
TARGETS = ("target-scale", "exploding", "rate-too-high")
UNSCALED = "targets × 1000 make every gradient 1000 times too long for the rate"
GROWS = ("exploding", "non-finite", "bad-initialisation")
EXPONENTIAL = "what a row of exponentials ends in depends on the seed"

# By their sources.
CASES = [
    # Stack Overflow 31880720, in dl-fl-repair
    case(ONES_AND_ZEROS, "softmax over one output", softmax_over_one, *CONSTANT,
         because=ONE_OUTPUT),
    # TheDeepChecker
    case(healthy.CNN_SGD, "scaled twice", scaled(1 / 255), "input-scale"),
    case(healthy.REGRESSION, "rate × 30", times(30), "rate-too-high"),
    case(healthy.CNN_SGD, "L2 0.1 in the loss", penalised(0.1, 2), "decay-fights"),
    case(healthy.REGRESSION, "normal init", wide_normal, *SCALES, because=TOO_WIDE),
    case(healthy.RESNET, "labels shuffled", shuffled, *UNRELATED, because=NO_RELATION),
    case(healthy.REGRESSION, "sigmoid as output", sigmoid_output, "targets-out-of-range", *OUTPUTS,
         because=OUT_OF_REACH, judged_by="error"),
    case(healthy.REGRESSION, "targets × 1000", scaled_targets, *TARGETS, because=UNSCALED,
         judged_by="error"),
    # DeepCrime, in dl-fl-repair
    case(healthy.CNN_ADAM, "Adadelta 0.001", with_algorithm(Adadelta, lr=0.001), "rate-too-low"),
    case(healthy.MLP_RMSPROP, "Adam 1.0", with_algorithm(Adam, lr=1.0), "rate-too-high"),
    case(healthy.MLP_RMSPROP, "SGD 0.01", with_algorithm(SGD, lr=0.01), "rate-too-low"),
    case(healthy.MLP_RMSPROP, "L1 0.1", penalised(0.1, 1), "decay-fights"),
    case(healthy.CNN_SGD, "weights 1", constant(1), *SYMMETRIC, because=ALL_ONE),
    case(healthy.CNN_SGD, "weights 0", constant(0), *SYMMETRIC, because=ALIKE),
    case(healthy.DEEP_RELU, "exponential activation", with_activation(exponential), *GROWS,
         because=EXPONENTIAL),
    case(healthy.DEEP_CNN, "hard sigmoid", with_activation(nn.Hardsigmoid), "vanishing"),
    # Circle and Blob, in DeepDiagnosis
    case(healthy.CIRCLES, "rate × 100", times(100), "rate-too-high"),
    case(healthy.CIRCLES, "rate × 0.01", times(0.01), "rate-too-low"),
    case(healthy.BLOBS, "inputs × 100", scaled(100), "input-scale"),
    # TrainCheck: PyTorch forum 84911, and Stack Overflow 60335387
    case(healthy.CNN_ADAM, "optimizer holds what is frozen", holds_frozen, "not-held"),
    case(healthy.MLP_ADAM, "optimizer holds what is frozen", holds_frozen, "not-held"),
]  # fmt: skip
