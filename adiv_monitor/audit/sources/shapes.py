"""The inputs that a model takes and the shape of its output, from its layers and by trying."""

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from adiv_monitor.audit.options.usage import UsageError, said
from adiv_monitor.audit.training.setup import seeded
from adiv_monitor.audit.training.target_loss import first_tensor

_SIDES = (64, 32, 28, 224, 96, 128, 256, 299, 384, 16, 8)  # sides of images in pixels
_LENGTHS = (32, 16, 64, 128, 8, 4)  # lengths of sequences
_MOST_TRIED = 60
_SAMPLES = 2  # batch norm needs more than one


@dataclass(frozen=True)
class Inputs:
    """One input of a model.

    Attributes:
        shape: Shape of one sample.
        vocabulary: Inputs are whole numbers below this; None: they are floats.
    """

    shape: tuple[int, ...]
    vocabulary: int | None = None

    def sample(self, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return random samples (count, *shape)."""
        if self.vocabulary is not None:
            return torch.randint(self.vocabulary, (count, *self.shape))
        return torch.randn(count, *self.shape, dtype=dtype)

    def __str__(self) -> str:
        kind = "floats" if self.vocabulary is None else f"whole numbers below {self.vocabulary}"
        return f"{','.join(map(str, self.shape))} ({kind})"


@dataclass(frozen=True)
class Fit:
    """Inputs that a model takes, and the shape of its output for them.

    Attributes:
        inputs: The inputs that the model accepted.
        output: Shape of the model's output, or of the first of several.
        several: Whether there are several outputs.
        samples: Number of samples in the trial.
    """

    inputs: Inputs
    output: tuple[int, ...]
    several: bool
    samples: int = _SAMPLES


def fit(model: nn.Module, shape: tuple[int, ...] | None) -> Fit:
    """Find the inputs that a model takes: its layers suggest them, and its forward accepts them.

    Layers are considered in the order in which they were registered.

    Args:
        model: The model, which is copied, so that a trial does not change it.
        shape: Shape of one sample, if it is known.

    Raises:
        UsageError: The model accepts no shape that was tried; the message lists what was tried.
    """
    try:
        twin = copy.deepcopy(model)
    except Exception as error:
        raise UsageError(
            f"{type(model).__name__} can't be copied, which is what the audit trains: {said(error)}"
        ) from error
    failures: dict[Inputs, Exception] = {}
    for inputs in _candidates(model, shape):
        try:
            return _tried(twin, inputs)
        except Exception as error:
            failures[inputs] = error
        if len(failures) == _MOST_TRIED:
            break
    raise UsageError(_told(model, failures, shape))


def _tried(twin: nn.Module, inputs: Inputs) -> Fit:
    parameter = next(twin.parameters())
    with torch.no_grad(), seeded(0):
        given = twin(inputs.sample(_SAMPLES, parameter.dtype).to(parameter.device))
    output = first_tensor(given)
    if output is None:
        raise TypeError("its output holds no tensor")
    return Fit(inputs, tuple(output.shape), output is not given)


def _told(
    model: nn.Module, failures: dict[Inputs, Exception], shape: tuple[int, ...] | None
) -> str:
    name = type(model).__name__
    if not failures:
        return (
            f"{name}: no layer tells what it takes; give --input-shape (such as 3,64,64), or "
            "batches of your own with --data package.module:function"
        )
    first, error = next(iter(failures.items()))
    if shape is not None:
        return f"--input-shape {first}: {name} can't take it: {said(error)}"
    return (
        f"{name}: found no input that it takes; tried {len(failures)} shapes, the first {first}: "
        f"{said(error)}. Give --input-shape, or where it takes several arguments, batches of your "
        "own with --data package.module:function"
    )


def _candidates(model: nn.Module, shape: tuple[int, ...] | None) -> Iterator[Inputs]:
    """Yield the inputs to try, each once; only those of the given shape if there is one."""
    seen = set()
    sides = tuple(dict.fromkeys(_own_sides(model) + _SIDES))
    of_sequences = any(isinstance(m, (nn.MultiheadAttention, nn.RNNBase)) for m in model.modules())
    guesses = [
        guess for layer in model.modules() for guess in _taken_by(layer, sides, of_sequences)
    ]
    if shape is not None:
        kinds = dict.fromkeys(guess.vocabulary for guess in guesses[:1])
        guesses = [Inputs(shape, kind) for kind in (*kinds, None)]
    for guess in guesses:
        if guess not in seen:
            seen.add(guess)
            yield guess


def _taken_by(layer: nn.Module, sides: tuple[int, ...], of_sequences: bool) -> Iterator[Inputs]:
    """Yield possible inputs of a model that begins with this layer.

    For a linear layer, `of_sequences` decides whether sequences or single vectors are first.
    """
    if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)):
        yield from (Inputs((length,), layer.num_embeddings) for length in _LENGTHS)
    elif isinstance(layer, nn.RNNBase):
        yield from (Inputs((length, layer.input_size)) for length in _LENGTHS)
    elif isinstance(layer, nn.MultiheadAttention):
        yield from (Inputs((length, layer.embed_dim)) for length in _LENGTHS)
    elif isinstance(layer, nn.modules.conv._ConvNd):
        places = layer.weight.ndim - 2
        if isinstance(layer, nn.modules.conv._ConvTransposeNd):
            sides = tuple(sorted(sides))
        for side in sides:
            size = (8, side, side) if places == 3 else (side,) * places
            yield Inputs((layer.in_channels, *size))
    elif isinstance(layer, nn.Linear):
        alone = Inputs((layer.in_features,))
        several = [Inputs((length, layer.in_features)) for length in _LENGTHS[:2]]
        yield from [*several, alone] if of_sequences else [alone, *several]
        if (image := _as_image(layer.in_features)) is not None:
            yield Inputs(image)
    elif isinstance(layer, nn.LayerNorm):
        yield Inputs((_LENGTHS[0], *layer.normalized_shape))
        yield Inputs(tuple(layer.normalized_shape))
    elif isinstance(layer, nn.modules.batchnorm._BatchNorm):
        yield Inputs((layer.num_features,))
        yield from (Inputs((layer.num_features, side, side)) for side in sides[:2])


def _own_sides(model: nn.Module) -> tuple[int, ...]:
    """Return the image side that a timm configuration fixes or an attribute declares, if any."""
    config: Any = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None)
    if isinstance(config, dict) and config.get("fixed_input_size") and "input_size" in config:
        return (int(config["input_size"][-1]),)
    size = getattr(model, "image_size", None) or getattr(model, "img_size", None)
    size = size[-1] if isinstance(size, (tuple, list)) and size else size
    return (size,) if isinstance(size, int) else ()


def _as_image(features: int) -> tuple[int, ...] | None:
    """Return the square image shape, grey or in colour, with that many entries, or None."""
    for channels in (1, 3):
        side = math.isqrt(features // channels)
        if side > 4 and channels * side * side == features:
            return (channels, side, side)
    return None
