"""Targets that fit a model's output."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from adiv_monitor.audit.options.config import Config
from adiv_monitor.audit.options.usage import UsageError
from adiv_monitor.audit.sources import losses
from adiv_monitor.audit.sources.shapes import SAMPLES, Fit, Inputs

MOST_CLASSES = 10  # of random data, so that each class has several samples

Kind = Literal["class", "next token", "class of each token", "class of each place", "values"]


@dataclass(frozen=True)
class Form:
    """How samples and their classes become a batch.

    Attributes:
        kind: Kind of the targets.
        inputs: The model's inputs.
        output: Shape of the output for one sample.
        classes: Number of classes that the output distinguishes.
        loss: Name of the loss for these targets.
        stand_ins: Target values of each class, (classes, *output); None: targets are not these.
    """

    kind: Kind
    inputs: Inputs
    output: tuple[int, ...]
    classes: int
    loss: str
    stand_ins: Tensor | None

    @property
    def takes_classes(self) -> bool:
        """Whether the targets follow from class labels alone."""
        return self.kind in ("class", "class of each place")

    def batch(self, x: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs and targets; `x` holds one token more than the model takes."""
        if self.kind == "next token":
            return x[..., :-1], x[..., 1:]
        if self.inputs.vocabulary is not None:
            x = x[..., :-1]
        if self.kind == "class of each token":
            return x, x % self.classes
        if self.kind == "class of each place":
            return x, self._everywhere(label)
        if self.kind == "values":
            return x, x if self.stand_ins is None else self.stand_ins[label]
        return x, label

    def _everywhere(self, label: Tensor) -> Tensor:
        """Expand each sample's class to all places.

        The classes are the output's first or last dimension.
        """
        places = self.output[1:] if self.output[0] == self.classes else self.output[:-1]
        return label.reshape(-1, *(1 for _ in places)).expand(-1, *places)


def form(fit: Fit, config: Config) -> Form:
    """Choose the targets that fit a model's outputs and the requested loss.

    One number for each of several classes: the sample's class. For tokens: the next token if the
    output has one entry for each of the vocabulary, else a class of each token. Anything else:
    values of the output's shape, unless --num-classes or the loss request classes. The values are
    the input itself if the output has its shape, else random values that stand for the sample's
    class.

    Raises:
        UsageError: The output does not have as many samples as the input.
    """
    if fit.output[:1] != (SAMPLES,):
        raise UsageError(
            f"the model's output for {SAMPLES} samples has shape {fit.output}, expected one "
            "output a sample; give batches and a loss of your own: --data, --loss"
        )
    output = fit.output[1:]
    known = losses.NAMED.get(config.loss or "")
    asked = known[1] if known is not None else None
    kind = _kind(fit, output, config, asked)
    classes = _classes(kind, output)
    named = config.loss or ("mse" if kind == "values" else "cross_entropy")
    reproduces = kind == "values" and output == fit.inputs.shape and asked != "shares"
    stand_ins = None
    if kind == "values" and not reproduces:
        generator = torch.Generator().manual_seed(config.seed)
        stand_ins = torch.randn(config.num_classes or MOST_CLASSES, *output, generator=generator)
        stand_ins = (stand_ins > 0).float() if asked == "shares" else stand_ins
    return Form(kind, fit.inputs, output, classes, named, stand_ins)


def _kind(fit: Fit, output: tuple[int, ...], config: Config, asked: str | None) -> Kind:
    if asked in ("values", "shares") or not output or (output == (1,) and asked is None):
        return "values"
    if len(output) == 1:
        return "class"
    tokens = fit.inputs.vocabulary
    if tokens is not None and output[:-1] == fit.inputs.shape:
        return "next token" if output[-1] == tokens else "class of each token"
    if asked == "classes" or config.num_classes is not None:
        return "class of each place"
    return "values"


def _classes(kind: Kind, output: tuple[int, ...]) -> int:
    if kind == "values":
        return 1
    if kind in ("next token", "class of each token") or len(output) == 1:
        return output[-1]
    return output[0] if len(output) > 2 else output[-1]
