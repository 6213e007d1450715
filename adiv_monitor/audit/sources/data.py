"""Batches from a named data source, in the form that the model and its loss take."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from adiv_monitor.audit.options.config import Config
from adiv_monitor.audit.options.usage import UsageError, blamed
from adiv_monitor.audit.run import MOST_STEPS
from adiv_monitor.audit.sources import huggingface, samples, targets
from adiv_monitor.audit.sources.imported import imported
from adiv_monitor.audit.training.batches import is_data_set, loader_of, mapped, taken

_SOURCES = ("random", "digits", "cifar10", "imagefolder", "text")
_MOST_BATCHES = 32  # different batches of random data: more would only use memory


def data(
    config: Config, model: nn.Module, device: torch.device, dtype: torch.dtype
) -> tuple[tuple[Any, ...], str | None, tuple[str, ...]]:
    """Return the batches that the config names, at most one per step, their loss, and notes.

    The loss is the name of one that fits the targets; None is the model's own.

    Raises:
        UsageError: There are no batches, or they don't fit the model.
    """

    def moved(tensor: Tensor) -> Tensor:
        # As from a usual loader: tensors that are not views into each other.
        return tensor.to(dtype if tensor.is_floating_point() else tensor.dtype).contiguous()

    is_named = config.data.partition(":")[0] in _SOURCES
    found, loss, notes = (_named if is_named else _users)(config, model)
    with blamed(f"--data {config.data}"):
        batches = tuple(
            mapped(batch, moved) for batch in taken(found, config.steps or MOST_STEPS, device)
        )
    if not is_named and isinstance(batches[0], tuple | list):
        is_real = getattr(batches[0][-1], "is_floating_point", lambda: True)()
        loss = "mse" if is_real else "cross_entropy"
    return batches, loss, notes


def _named(config: Config, model: nn.Module) -> tuple[Iterable[Any], str | None, tuple[str, ...]]:
    if huggingface.is_pretrained(model):
        form = huggingface.form(model, config.input_shape)
    else:
        form = targets.form(model, config)
    samples, classes, notes = _samples(config, form)
    if form.classes is not None and classes > form.classes:
        raise UsageError(
            f"--data {config.data} has {classes} classes, the model has {form.classes} outputs: "
            f"""give it more by --model-args, such as '{{"num_classes": {classes}}}'"""
        )
    loader = loader_of(samples, config.batch_size, config.seed)
    return (form.batch(x, label) for x, label in loader), form.loss, notes


def _samples(config: Config, form: targets.Form) -> tuple[Dataset[Any], int, tuple[str, ...]]:
    """Return a dataset of (sample, class) pairs, the number of classes, and notes."""
    kind, _, argument = config.data.partition(":")
    inputs = form.inputs
    if kind == "random":
        most = min(targets.MOST_CLASSES, form.classes or targets.MOST_CLASSES)
        classes = config.num_classes or most
        count = config.batch_size * min(config.steps or MOST_STEPS, _MOST_BATCHES)
        note = (
            "The data were random: inputs that depend on their class, of mean 0 and standard "
            "deviation 1 where they are floats. What this says of inputs says nothing of yours."
        )
        return samples.random(inputs, classes, count, config.seed), classes, (note,)
    if kind == "text":
        if form.classes is not None:
            raise UsageError(f"--data {config.data} has no labels for the model's classes")
        return *samples.text(argument, inputs, huggingface.tokenizer(config.model)), ()
    if inputs.vocabulary is not None:
        raise UsageError(f"--data {config.data}: are images, the model takes tokens")
    if kind == "digits":
        return *samples.digits(inputs.shape), ()
    return *samples.of_files(kind, argument, inputs.shape, download=config.download), ()


def _users(config: Config, model: nn.Module) -> tuple[Any, str | None, tuple[str, ...]]:
    found = imported(config.data, "--data", _SOURCES)
    with blamed(f"--data {config.data}"):
        batches = found() if callable(found) else found
        if not is_data_set(batches):
            return batches, None, ()
        note = f"--data is a data set: shuffled, in batches of {config.batch_size} (--batch-size)."
        return loader_of(batches, config.batch_size, config.seed), None, (note,)
