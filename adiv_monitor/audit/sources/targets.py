"""What a model takes, and targets that fit its output."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from adiv_monitor.audit.options.config import Config
from adiv_monitor.audit.options.usage import UsageError, blamed
from adiv_monitor.audit.training.setup import seeded
from adiv_monitor.audit.training.target_loss import first_tensor

MOST_CLASSES = 10  # of random data, so that each class has several samples

_SAMPLES = 2  # of the pass that tells the output's shape; batch norm needs more than one
_SIDE = 64  # of images, in pixels, for models that take any
_SIDES = {"Inception3": 299, "MaxVit": 224}  # of torchvision's models that take no small ones
# Shape of one sample of each named source, for models whose own shape isn't known.
_OF_DATA = {
    "digits": (1, 8, 8),
    "cifar10": (3, 32, 32),
    "imagefolder": (3, _SIDE, _SIDE),
    "text": (32,),
}

Made = Callable[[Tensor, Tensor], Any]  # made of samples and their classes


@dataclass(frozen=True)
class Inputs:
    """One input of a model.

    Attributes:
        shape: Shape of one sample.
        vocabulary: Inputs are whole numbers below this; None: they are floats.
    """

    shape: tuple[int, ...]
    vocabulary: int | None = None


@dataclass(frozen=True)
class Form:
    """How samples and their classes become a batch.

    Attributes:
        inputs: The model's inputs.
        batch: The batch of some samples; samples of tokens have one more than the model takes.
        classes: Number of classes that the model tells apart; None: as many as the data have.
        loss: Name of the loss for these targets; None: the model's own.
    """

    inputs: Inputs
    batch: Made
    classes: int | None
    loss: str | None


def form(model: nn.Module, config: Config) -> Form:
    """Choose the targets that fit a model's outputs and the requested loss.

    One number for each of several classes: the sample's class. For tokens: the next token if the
    output has one entry for each of the vocabulary, else a class of each token. Anything else:
    values of the output's shape, unless --num-classes or the loss request classes. The values are
    the input itself if the output has its shape, else random values that stand for the sample's
    class.

    Raises:
        UsageError: The shape of the inputs is not known, or the data have other targets than these.
    """
    inputs, output = fit(model, config.input_shape, config.data.partition(":")[0])
    target, classes, loss = _target(inputs, output, config)

    def batch(x: Tensor, label: Tensor) -> Any:
        return x if inputs.vocabulary is None else x[..., :-1], target(x, label)

    return Form(inputs, batch, classes, config.loss or loss)


def _target(
    inputs: Inputs, output: tuple[int, ...], config: Config
) -> tuple[Made, int | None, str]:
    """Return what makes the targets, the number of classes, and the name of the loss."""
    # What the loss asks for; one that is no name of ours takes whatever fits the output.
    of_classes = config.loss in ("cross_entropy", "nll")
    of_shares = config.loss == "binary_cross_entropy_with_logits"
    of_values = of_shares or config.loss in ("mse", "l1", "smooth_l1", "huber")
    if output and not of_values:
        if inputs.vocabulary is not None and output[:-1] == inputs.shape:
            if output[-1] == inputs.vocabulary:
                return lambda x, label: x[..., 1:], None, "cross_entropy"
            return lambda x, label: x[..., :-1] % output[-1], None, "cross_entropy"
        is_class = len(output) == 1 and output != (1,)
        if of_classes or is_class or (config.num_classes and len(output) > 1):
            # The classes are the first dimension of an image, else the last.
            classes, *places = output if len(output) > 2 else (output[-1], *output[:-1])
            alike = [-1, *(1 for _ in places)]
            return lambda x, label: label.view(alike).expand(-1, *places), classes, "cross_entropy"
    if output == inputs.shape and not of_shares:
        return lambda x, label: x, None, "mse"
    if config.data != "random":
        raise UsageError(
            f"--data {config.data} has classes; the model's outputs {output} need other targets: "
            "give --num-classes or --loss, or batches of your own"
        )
    generator = torch.Generator().manual_seed(config.seed)
    drawn = torch.randn(config.num_classes or MOST_CLASSES, *output, generator=generator)
    stand_ins = (drawn > 0).float() if of_shares else drawn
    return lambda x, label: stand_ins[label], None, "mse"


def fit(
    model: nn.Module, shape: tuple[int, ...] | None, data: str = "random"
) -> tuple[Inputs, tuple[int, ...]]:
    """Return the inputs of a model, and the shape of its output for one sample.

    The inputs are whole numbers if the first layer with weights is an embedding, else floats. Of
    several outputs, the shape is that of the first.

    Args:
        model: The model, of which a copy runs.
        shape: Shape of one sample; None: that of a model of torchvision or timm, else that of the
            data's samples.
        data: Name of a data source.

    Raises:
        UsageError: The shape is not known, or the model can't take it.
    """
    name = type(model).__name__
    shape = shape or _of_images(model) or _OF_DATA.get(data)
    if shape is None:
        raise UsageError(
            f"{name}: the shape of its inputs is not known; give batches with --data module:name, "
            "or the shape of one sample with --input-shape, such as 3,64,64"
        )
    layers = (m for m in model.modules() if not [*m.children()] and [*m.parameters()])
    first = next(layers, None)
    words = first.num_embeddings if isinstance(first, (nn.Embedding, nn.EmbeddingBag)) else None
    like = next(model.parameters())
    size = (_SAMPLES, *shape)
    told = f"--input-shape {shape}: {name} can't take it; give another one, or batches with --data"
    with blamed(told), torch.no_grad(), seeded(0):
        x = torch.randn(size) if words is None else torch.randint(words, size)
        x = x.to(like.device, like.dtype if words is None else None)
        output = first_tensor(copy.deepcopy(model)(x))
        if output is None or output.shape[:1] != (_SAMPLES,):
            raise ValueError("it gives no output for each sample")
    return Inputs(shape, words), tuple(output.shape[1:])


def _of_images(model: nn.Module) -> tuple[int, ...] | None:
    """Return the shape of the images that a model of torchvision or timm takes; None for others."""
    config = getattr(model, "pretrained_cfg", None)
    if isinstance(config, dict) and "input_size" in config:
        side = config["input_size"][-1] if config.get("fixed_input_size") else _SIDE
    elif type(model).__module__.startswith("torchvision.models."):
        side = getattr(model, "image_size", _SIDES.get(type(model).__name__, _SIDE))
    else:
        return None
    channels = (m.in_channels for m in model.modules() if isinstance(m, nn.Conv2d))
    return next(channels, 3), side, side
