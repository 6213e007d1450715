"""Checks of the arguments of `Monitor`, with errors that say what is expected."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TypeGuard

from torch import nn
from torch.optim import Optimizer

from adiv_monitor.capture.loss_hook import takes
from adiv_monitor.capture.selection import LayerChoice, Selection, select, trainable
from adiv_monitor.report import MEASURES, LayerReading
from adiv_monitor.sinks.sink import check_sinks
from adiv_monitor.step.schedule import Unasked
from adiv_monitor.step.stepping import runs_hooks
from adiv_monitor.step.training import Training

_COLUMNS = {*MEASURES, *LayerReading.__annotations__, "step", "layer", "loss", "learning_rate"}
DEFAULT_MAX_ROWS = 128
DEFAULT_MAX_OVERHEAD = Unasked(0.01)


def check_training(training: Training) -> None:
    """Raise TypeError or ValueError for a training, or options of it, that can't be monitored."""
    of = training
    _check_model(of.model)
    _check_optimizer(of.optimizer)
    if of.loss is not None:
        _check_loss("loss", of.loss)
    _check_count("max_rows", of.max_rows, or_none=True)
    for name in ("attainable", "attention", "spectral"):
        if not isinstance(value := getattr(of, name), bool):
            raise TypeError(f"Monitor({name}=…): got {value!r}, expected True or False")
    if of.watch not in ("loss", "norms", None):
        raise ValueError(f"Monitor(watch=…): got {of.watch!r}, expected 'loss', 'norms' or None")
    _check_realised(of.realised, of.optimizer)
    if of.alignment is not None:
        from adiv_monitor.alignment.probe import Probe

        if not isinstance(of.alignment, Probe):
            raise TypeError(
                f"Monitor(alignment=…): got {type(of.alignment).__name__}, expected an "
                "adiv_monitor.alignment.Probe of the batch to run, or None"
            )
    _check_layers(of)
    own = {} if of.own_measures is None else of.own_measures
    if not isinstance(own, Mapping) or not all(
        isinstance(name, str) and name not in _COLUMNS and callable(f) for name, f in own.items()
    ):
        raise TypeError(
            f"Monitor(own_measures=…): got {own!r}, expected a dictionary of functions of a "
            "layer's rows by name, none of which is that of a measure or column of the monitor"
        )
    if of.optimizer is not None and not {*trainable(of.model)}.intersection(of.trained()):
        raise ValueError(
            f"Monitor: got a {type(of.optimizer).__name__} that holds none of the trainable "
            f"parameters of {type(of.model).__name__}, expected the optimizer that trains this "
            "model; if it trains master copies, give optimizer=None and call end_step() after each "
            "backward pass"
        )


def check_schedule(every_n_steps: object, max_overhead: object, seed: object) -> None:
    """Raise ValueError for an invalid measuring interval, overhead or seed."""
    _check_count("every_n_steps", every_n_steps, or_none=True)
    if max_overhead is not None and not _is_share(max_overhead):
        raise ValueError(
            f"Monitor(max_overhead=…): got {max_overhead!r}, expected a share of the training time "
            "above 0 and below 1, such as 0.01 for 1 %, or None"
        )
    _check_count("seed", seed, least=0)


def _check_layers(of: Training) -> None:
    layers, several = of.layers, of.layers_per_step
    _check_count("layers_per_step", several, or_none=True)
    for name in ("realised", "alignment"):
        if several is not None and getattr(of, name) not in (False, None):
            raise ValueError(
                f"Monitor({name}=…): got it with layers_per_step={several}, expected one "
                "of the two: it copies all parameters, which layers_per_step is meant to avoid"
            )
    if isinstance(layers, str):
        raise TypeError(
            f"Monitor(layers=…): got the string {layers!r}, expected a list: [{layers!r}]"
        )
    if callable(layers) and not takes(layers, "", None):
        raise TypeError(
            "Monitor(layers=…): got a function that does not take two arguments, expected a "
            "predicate (path, module) → bool"
        )
    if layers is not None and not callable(layers):
        wrong = [x for x in layers if not isinstance(x, str)] if _several(layers) else [layers]
        if wrong:
            raise TypeError(
                f"Monitor(layers=…): got {type(wrong[0]).__name__}, expected glob patterns over "
                "module paths, or a predicate (path, module) → bool"
            )


def check_reports(
    sinks: object, keep: object, alarms: object, on_alarm: object, on_error: object
) -> None:
    """Raise TypeError or ValueError for invalid sinks, alarms or ways to handle failures."""
    _check_count("keep", keep)
    if on_alarm not in ("warn", "stop"):
        raise ValueError(f"Monitor(on_alarm=…): got {on_alarm!r}, expected 'warn' or 'stop'")
    if on_alarm == "stop" and not alarms:
        raise ValueError(
            "Monitor(on_alarm=…): got 'stop' without alarms, expected some: alarms='default'"
        )
    if on_error not in ("warn", "raise"):
        raise ValueError(f"Monitor(on_error=…): got {on_error!r}, expected 'warn' or 'raise'")
    check_sinks("Monitor", sinks)


def check_step(step: object) -> int:
    """Return the step number passed to `Monitor.log_loss`, checked.

    Raises:
        ValueError: the step is not an integer of at least 0.
    """
    if isinstance(step, int) and not isinstance(step, bool) and step >= 0:
        return step
    raise ValueError(
        f"Monitor.log_loss(step=…): got {step!r}, expected an integer of at least 0, or None"
    )


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"Monitor(model=…): got {type(model).__name__}, expected a torch.nn.Module")
    if next(trainable(model), None) is None:
        raise ValueError(
            f"Monitor(model=…): got a {type(model).__name__} without trainable parameters, "
            "expected at least one; there is nothing to measure"
        )


def _check_optimizer(optimizer: object) -> None:
    if optimizer is None:
        return
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"Monitor(optimizer=…): got {type(optimizer).__name__}, expected a "
            "torch.optim.Optimizer or None (then call end_step() after each backward pass)"
        )
    if not runs_hooks(optimizer):
        raise TypeError(
            f"Monitor(optimizer=…): got a {type(optimizer).__name__}, which runs no step hooks "
            "(its __init__ never called that of torch.optim.Optimizer), expected the optimizer "
            "that it steps through; of DeepSpeed's, only stage 0 in float32 steps the parameters"
        )


def _check_count(name: str, value: object, *, or_none: bool = False, least: int = 1) -> None:
    if or_none and value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        none = " or None" if or_none else ""
        raise ValueError(
            f"Monitor({name}=…): got {value!r}, expected an integer of at least {least}{none}"
        )


def _check_loss(name: str, loss: object) -> None:
    if isinstance(loss, type):
        raise TypeError(
            f"Monitor({name}=…): got the class {loss.__name__}, expected an instance: "
            f"{loss.__name__}()"
        )
    if not callable(loss):
        raise TypeError(
            f"Monitor({name}=…): got {type(loss).__name__}, expected the module that computes the "
            "loss, or a function (output of the model) → loss"
        )
    if getattr(type(loss), "forward", None) is nn.CosineSimilarity.forward:
        raise TypeError(
            f"Monitor({name}=…): got CosineSimilarity, which is high where a loss is low, expected "
            "the module that computes the loss, or monitor.log_loss(loss)"
        )
    if not isinstance(loss, nn.Module) and not takes(loss, None):
        raise TypeError(
            f"Monitor({name}=…): got {getattr(loss, '__name__', loss)}, expected a function of the "
            "model's output alone, the loop's module (nn.MSELoss()), or monitor.log_loss(loss)"
        )


def _check_realised(realised: object, optimizer: object) -> None:
    if not isinstance(realised, bool):
        _check_loss("realised", realised)
    if realised is not False and optimizer is None:
        raise ValueError(
            "Monitor(realised=…): got it with optimizer=None, expected the optimizer whose steps "
            "change the weights"
        )


def _is_share(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1


def _several(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, Sequence)


def check_choice(selection: Selection, model: nn.Module, choice: LayerChoice) -> None:
    """Raise ValueError if no module was chosen, or if a pattern matches none."""
    if choice is None and (selection.places or selection.unsupported):
        return
    everything = select(model, None, None)
    paths = [*everything.paths, *everything.unsupported]
    if isinstance(choice, Sequence):
        idle = [p for p in choice if not any(fnmatchcase(path, p) for path in paths)]
        choice = idle or choice
        if not idle and choice:
            return
    elif selection.places or selection.unsupported:
        return
    shown = ", ".join(map(repr, paths[:8])) + (", …" if len(paths) > 8 else "")
    raise ValueError(
        f"Monitor(layers=…): got {choice!r}, which matches no module that has trainable "
        f"parameters, expected patterns or a predicate that match some of: {shown}"
    )
