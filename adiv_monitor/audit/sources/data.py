"""Batches from a named data source, in the form that the model and its loss take."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten_with_path, tree_map_only
from torch.utils.data import Dataset

from adiv_monitor.audit.options.config import Config
from adiv_monitor.audit.options.usage import UsageError, blamed
from adiv_monitor.audit.sources import huggingface, images, losses, random_data, text
from adiv_monitor.audit.sources.imported import imported
from adiv_monitor.audit.sources.shapes import Fit, Inputs, fit
from adiv_monitor.audit.sources.targets import MOST_CLASSES, Form, form
from adiv_monitor.audit.training.batches import is_data_set, loader_of

_OF_FILES = ("cifar10", "imagefolder", "text")
_SOURCES = ("random", "digits", *_OF_FILES)
_MOST_BATCHES = 32  # different batches of random data: more would only use memory


@dataclass(frozen=True)
class Data:
    """The data that a model trains on.

    Attributes:
        batches: Batches on the model's device.
        inputs: Shape and kind of one sample; None for the user's own batches.
        classes: Number of classes; None if there are none, or if it is unknown.
        loss: Name of the loss that fits the targets; None: the model's own.
        notes: Remarks that a reader of the report must know.
    """

    batches: Iterable[Any]
    inputs: Inputs | None
    classes: int | None
    loss: str | None
    notes: tuple[str, ...] = ()


def data(config: Config, model: nn.Module, device: torch.device, dtype: torch.dtype) -> Data:
    """Return the batches that the config names.

    Raises:
        UsageError: There are no batches, they don't fit the model, or hold values that are not
            finite.
    """
    kind, _, argument = config.data.partition(":")
    if kind not in _SOURCES:
        found = _users(config)
    elif bool(argument) != (kind in _OF_FILES):
        raise _unknown(config)
    elif huggingface.is_pretrained(model):
        found = _for_pretrained(config, model)
    else:
        found = _for_module(config, model)
    batches = _taken(found.batches, config, device, dtype)
    if kind not in _SOURCES and not isinstance(first := batches[0], dict):
        if not isinstance(first, (tuple, list)) or len(first) < 2:
            raise UsageError(
                f"--data {config.data}: got a batch that is a {type(first).__name__}, expected "
                "(inputs…, target), or a dict of the model's arguments"
            )
        found = replace(found, loss=losses.default(first[-1]))
    return replace(found, batches=batches)


def _unknown(config: Config) -> UsageError:
    return UsageError(
        f"--data {config.data}: expected random, digits, cifar10:ROOT, imagefolder:DIR, text:FILE "
        "or package.module:function"
    )


def _for_module(config: Config, model: nn.Module) -> Data:
    found = fit(model, config.input_shape, config.data.partition(":")[0])
    wanted = form(found, config)
    examples, classes, notes = _examples(config, found.inputs, wanted.classes)
    _check_classes(config, wanted, classes, found)
    batches = _batches(examples, config, lambda x, label: wanted.batch(x, label))
    told = classes if wanted.takes_classes else config.num_classes
    if found.several:
        notes += (f"{type(model).__name__} gives several outputs: the loss is that of the first.",)
    return Data(batches, found.inputs, told, wanted.loss, notes)


def _for_pretrained(config: Config, model: Any) -> Data:
    inputs = huggingface.inputs(model, config.input_shape)
    outputs = huggingface.classes(model)
    examples, classes, notes = _examples(config, inputs, outputs)
    if config.data.startswith("text:") and outputs is not None:
        raise UsageError(
            f"--data {config.data} has no labels for the head of {type(model).__name__}: give "
            "batches of your own by --data package.module:function"
        )
    if outputs not in (None, 1) and classes > outputs:
        raise UsageError(
            f"--data {config.data} has {classes} classes, {type(model).__name__} tells {outputs} "
            f"""apart; give --model-args '{{"num_labels": {classes}}}'"""
        )
    length = inputs.shape[-1] if inputs.vocabulary is not None else None

    def batch(x: Tensor, label: Tensor) -> huggingface.Batch:
        return huggingface.batch(model, x if length is None else x[..., :length], label)

    told = config.num_classes if outputs is None else classes
    return Data(_batches(examples, config, batch), inputs, told, None, notes)


def _examples(
    config: Config, inputs: Inputs, outputs: int | None
) -> tuple[Dataset[Any], int, tuple[str, ...]]:
    """Return a dataset of (sample, class) pairs, the number of classes, and notes."""
    kind, _, argument = config.data.partition(":")
    if kind == "random":
        most = MOST_CLASSES if outputs is None or outputs == 1 else min(MOST_CLASSES, outputs)
        classes = config.num_classes or most
        count = config.batch_size * min(config.steps, _MOST_BATCHES)
        made = random_data.examples(inputs, classes, count, config.seed)
        note = (
            "The data were random: inputs that depend on their class, of mean 0 and standard "
            "deviation 1 where they are floats. What this says of inputs says nothing of yours."
        )
        return made, classes, (note,)
    if kind == "text":
        return *text.examples(argument, inputs, huggingface.tokenizer(config.model)), ()
    if inputs.vocabulary is not None:
        raise UsageError(f"--data {config.data}: are images, the model takes {inputs}")
    if kind == "digits":
        return *images.digits(inputs.shape), ()
    if kind == "cifar10":
        return *images.cifar10(argument, inputs.shape, config.download), ()
    return *images.imagefolder(argument, inputs.shape), ()


def _check_classes(config: Config, wanted: Form, classes: int, found: Fit) -> None:
    if config.data != "random" and wanted.stand_ins is not None:
        raise UsageError(
            f"--data {config.data} has classes; the model's outputs {found.output[1:]} with "
            f"the loss {wanted.loss} need other targets: give --num-classes or --loss, or "
            "batches of your own"
        )
    if wanted.takes_classes and classes > wanted.classes:
        raise UsageError(
            f"--data {config.data} has {classes} classes, the model has {wanted.classes} outputs: "
            f"""give it more by --model-args, such as '{{"num_classes": {classes}}}'"""
        )


def _batches(
    examples: Dataset[Any], config: Config, batch: Callable[[Tensor, Tensor], Any]
) -> Iterator[Any]:
    for x, label in loader_of(examples, config.batch_size, config.seed):
        # As from a usual loader: tensors that are not views into each other.
        yield tree_map_only(Tensor, torch.Tensor.contiguous, batch(x, label))


def _users(config: Config) -> Data:
    if ":" not in config.data and "." not in config.data:
        raise _unknown(config)
    found = imported(config.data, "--data")
    notes: tuple[str, ...] = ()
    expected = "expected an iterable of batches or a data set, or a function that gives one"
    with blamed(f"--data {config.data}: {expected}"):
        batches = found() if callable(found) else found
        if is_data_set(batches):
            batches = loader_of(batches, config.batch_size, config.seed)
            notes = (
                f"--data is a data set: it was shuffled, in batches of {config.batch_size} "
                "(--batch-size).",
            )
        batches = iter(batches)
    return Data(batches, None, None, None, notes)


def _taken(
    batches: Iterable[Any], config: Config, device: torch.device, dtype: torch.dtype
) -> tuple[Any, ...]:
    """Return the batches, at most one per step, on the device, in the dtype and finite."""
    where = f"--data {config.data}: "
    taken: list[Any] = []
    made = iter(batches)

    def moved(tensor: Tensor) -> Tensor:
        return tensor.to(device, dtype if tensor.is_floating_point() else None)

    for number in range(config.steps):
        with blamed(f"{where}batch {number} raised"):
            if (batch := next(made, None)) is None:
                break
            _check_finite(batch, f"{where}batch {number}")
            taken.append(tree_map_only(Tensor, moved, batch))
    if not taken:
        raise UsageError(f"{where}gave no batch")
    return tuple(taken)


def _check_finite(batch: Any, where: str) -> None:
    for path, value in tree_flatten_with_path(batch)[0]:
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        if is_float and (wrong := int((~value.isfinite()).sum())):
            part = "".join(map(str, path)) or "itself"
            raise UsageError(
                f"{where}: {wrong} of the {value.numel()} values of part {part} are NaN or "
                "infinite; clean the data first"
            )
