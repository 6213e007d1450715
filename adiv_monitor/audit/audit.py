"""The audit: trains a copy of a model, finds faults in its training, and tries fixes."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from adiv_monitor.arguments import DEFAULT_MAX_ROWS

if TYPE_CHECKING:
    from adiv_monitor.audit.report import AuditReport
    from adiv_monitor.audit.training.setup import Loss, OptimizerFactory
    from adiv_monitor.audit.training.train import Progress

# Argument → its types, what else is true of it, and both in words.
_COUNT = (int, lambda x: x >= 1, "an integer of at least 1")
_NUMBER = (int, float)
_NUMBERS: dict[str, Any] = {
    **dict.fromkeys(("steps", "every_n_steps", "max_rows", "batch_size", "num_classes"), _COUNT),
    "seed": (int, lambda x: x >= 0, "an integer of at least 0"),
    "clip_norm": (_NUMBER, lambda x: 0 < x < math.inf, "a number above 0, or None not to clip"),
}
_OPTIONAL = ("steps", "every_n_steps", "max_rows", "num_classes", "clip_norm")


def check_numbers(
    given: Mapping[str, Any], named: Callable[[str], str] = "audit({}=…)".format
) -> None:
    """Raise ValueError if a numeric argument, or an option, is out of its range.

    Args:
        given: values by name, of which those that are not in the table are not checked.
        named: function of a name that returns how the user knows it.
    """
    for name in given.keys() & _NUMBERS.keys():
        value, (kinds, is_right, words) = given[name], _NUMBERS[name]
        is_number = isinstance(value, kinds) and not isinstance(value, bool) and is_right(value)
        if not is_number and not (value is None and name in _OPTIONAL):
            raise ValueError(f"{named(name)}: got {value!r}, expected {words}")


def check_training(model: object, loss: object, optimizer: object) -> None:
    """Raise TypeError or ValueError if the model, loss or optimizer can't be used for training."""
    check_model(model)
    if loss is not None and not callable(loss):
        told = "expected a function (model, batch) → loss or (output, target) → loss, or None"
        raise TypeError(f"audit(loss=…): got {type(loss).__name__}, {told}")
    makes = callable(optimizer) and not isinstance(optimizer, type)  # which takes parameters
    if not (optimizer is None or isinstance(optimizer, Optimizer) or makes):
        told = "expected a torch.optim.Optimizer, or a function model → optimizer"
        raise TypeError(f"audit(optimizer=…): got {type(optimizer).__name__}, {told}")


def check_model(model: object) -> None:
    """Raise TypeError or ValueError if this is no model, or has nothing to train."""
    got = f"audit(model=…): got a {type(model).__name__}"
    if not isinstance(model, nn.Module):
        raise TypeError(f"{got}, expected a torch.nn.Module")
    if lazy := [name for name, parameter in model.named_parameters() if is_lazy(parameter)]:
        told = "has no shape yet, expected one that has run: call it with one batch first"
        raise ValueError(f"{got} whose parameter {lazy[0]} {told}")
    if not any(p.requires_grad for p in model.parameters()):
        told = "expected at least one with requires_grad=True"
        raise ValueError(f"{got} without trainable parameters, {told}")


def audit(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    loss: "Loss | None" = None,
    optimizer: "Optimizer | OptimizerFactory | None" = None,
    steps: int | None = None,
    every_n_steps: int | None = None,
    max_rows: int | None = DEFAULT_MAX_ROWS,
    clip_norm: float | None = None,
    try_fixes: bool = True,
    seed: int = 0,
    own_losses: Mapping[int, float] | Sequence[float] | None = None,
    progress: "Progress | None" = None,
    _facts: Mapping[str, str] | None = None,
) -> "AuditReport":
    """Train a copy of a model for some steps, and report faults of its training.

    The model, the optimizer, the batches and random numbers are unchanged afterwards.

    Args:
        model: the model in the state in which training would begin. Copies of it are trained.
        batches: an iterable of batches; one is taken for each step, and if there are fewer, they
            are repeated. A data set of samples is shuffled, in batches of 16.
        loss: function (model, batch) → the loss, one number; or a loss (output, target) → number,
            such as `nn.CrossEntropyLoss()`: the model is called with all parts of a batch but the
            last, which is the target. The names of the parameters tell: the first one of the former
            is `model`, `net`, `network`, `module` or `m`, or the second one `batch`, `b` or `data`.
            None: the model returns an object with the loss as its `loss`, called as
            `model(**batch)`, `model(*batch)` or `model(batch)`.
        optimizer: optimizer of the model's parameters, with the learning rates to test, or a
            function that makes one for a model. None: AdamW with learning rate 1e-3.
        steps: number of training steps, at least 1; None: 60, or fewer if a step is costly, but at
            least 24 (what a step costs is counted in operators and sizes, so it is the same on all
            machines).
        every_n_steps: each step whose number is a multiple of this is measured; None: a tenth of
            the given steps, or 6.
        max_rows: number of rows to sample per layer and step; None: all of them.
        clip_norm: largest norm of the gradient; None: it is not clipped.
        try_fixes: whether to try fixes and other learning rates in short runs. Their number and
            length follow from the number of steps and from the cost of a step
            (`record.facts.step_cost`), not from the clock.
        seed: seed of the run's random numbers.
        own_losses: losses of your own run: those of its steps 0, 1, 2, …, or step → loss. The
            verdict says if the copy behaves otherwise.
        progress: called with (name of the part, units done, units in all).

    Raises:
        TypeError, ValueError: an argument is not as expected; the message says what is expected.
    """
    given = dict(locals())
    check_training(model, loss, optimizer)
    check_numbers(given)
    # Rules and trials are loaded by an audit, not by who imports the package for its monitor.
    from adiv_monitor.audit.run import run

    return run(given)
