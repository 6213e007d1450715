"""The inputs that a model takes and the shape of its output."""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from adiv_monitor.audit.options.usage import UsageError, blamed
from adiv_monitor.audit.training.setup import seeded
from adiv_monitor.audit.training.target_loss import first_tensor

SAMPLES = 2  # of the pass that tells the output's shape; batch norm needs more than one
_SIDE = 64  # of images, in pixels, for models that take any
_SIDES = {"Inception3": 299, "MaxVit": 224}  # of torchvision's models that take no small ones
# Shape of one sample of each named source, for models whose own shape isn't known.
_OF_DATA = {
    "digits": (1, 8, 8),
    "cifar10": (3, 32, 32),
    "imagefolder": (3, _SIDE, _SIDE),
    "text": (32,),
}


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
    """The inputs of a model, and the shape of its output for two samples of them.

    Attributes:
        inputs: The inputs.
        output: Shape of the model's output, or of the first of several.
        several: Whether there are several outputs.
    """

    inputs: Inputs
    output: tuple[int, ...]
    several: bool


def fit(model: nn.Module, shape: tuple[int, ...] | None, data: str = "random") -> Fit:
    """Return the inputs of a model and the shape of its output.

    The inputs are whole numbers if the first layer with weights is an embedding, else floats.

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
            f"{name}: the shape of its inputs is not known; give batches with --data "
            "package.module:name, or the shape of one sample with --input-shape, such as 3,64,64"
        )
    layers = (m for m in model.modules() if not [*m.children()] and [*m.parameters()])
    first = next(layers, None)
    words = first.num_embeddings if isinstance(first, (nn.Embedding, nn.EmbeddingBag)) else None
    inputs = Inputs(shape, words)
    parameter = next(model.parameters())
    instead = "give another one, or batches of your own with --data package.module:name"
    told = f"--input-shape {inputs}: {name} can't take it; {instead}"
    with blamed(told), torch.no_grad(), seeded(0):
        x = inputs.sample(SAMPLES, parameter.dtype).to(parameter.device)
        given = copy.deepcopy(model)(x)
    output = first_tensor(given)
    if output is None:
        raise UsageError(f"{name}: its output holds no tensor; give --data and --loss")
    return Fit(inputs, tuple(output.shape), output is not given)


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
