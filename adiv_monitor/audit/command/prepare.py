"""From the options of an audit to its objects: model, batches, loss and optimizer."""

import csv
import inspect
import json
from collections.abc import Callable, Mapping
from math import isqrt, prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import Dataset, TensorDataset

from adiv_monitor.audit.command import code, models
from adiv_monitor.audit.command.code import UsageError, blamed, imported, needed
from adiv_monitor.audit.command.models import MOST_CLASSES, Form, Shape, form
from adiv_monitor.audit.command.options import Config
from adiv_monitor.audit.run import MOST_STEPS, adamw
from adiv_monitor.audit.training import setup as settings
from adiv_monitor.audit.training.batches import is_data_set, loader_of, mapped, taken, tensors
from adiv_monitor.audit.training.setup import Loss, OptimizerFactory, Setup, of_batch, seeded
from adiv_monitor.audit.training.train import train

_DTYPES = {"64-true": torch.float64, "bf16-true": torch.bfloat16}  # others: float32
_OTHERS = ("val", "test", "eval", "epoch")  # in names of columns that are no losses of steps
_PLACES = 4  # cells of a class's pattern along each side of a random image
_WORDS = 64  # number of different random tokens
_SUCCESSORS = 4  # number of random tokens that may follow a token
_MOST_BATCHES = 32  # different batches of random data: more would only use memory
_RANDOM = (
    "The data were random: inputs that depend on their class, of mean 0 and standard deviation 1 "
    "where they are floats. What this says of inputs says nothing of yours."
)

Samples = tuple[Dataset[Any], int]  # pairs of a sample and its class, and the number of classes


def prepare(config: Config) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Make everything that the config names, and try it with one training step of a copy.

    Returns:
        The arguments of `audit` that are objects, and notes that a reader of the report must know.

    Raises:
        UsageError: An option can't be used.
    """
    with blamed(f"--device {config.device}: can't be used here"):
        device = torch.device(config.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=device).add(1)
    with seeded(config.seed), code.watched(may_train=config.run_script) as ran:
        optimizer = optimizer_of(config.optimizer, config.optimizer_args)
        model = models.build(config.model, config.model_args)
        steps = code.steps_of(ran, model)
        trained = f"weights have been trained: {steps:,} steps during import" if steps else ""
        if config.checkpoint is not None:
            models.load(model, config.checkpoint, trusted=config.trust_checkpoint)
            trained = f"weights from {config.checkpoint}"
        dtype = _DTYPES.get(config.precision)
        model = model.to(device, dtype)
        if isinstance(optimizer, Optimizer):
            optimizer.load_state_dict(optimizer.state_dict())  # onto the model's device
        batches, fitting, notes = data(config, model, device, dtype or torch.float32)
        name = config.loss or fitting
        loss: Loss = loss_of(name) if name else settings.loss_of_output
    if config.precision == "bf16-mixed":
        loss = torch.autocast(device.type, torch.bfloat16)(loss)
    shapes = ", ".join(str(tuple(x.shape)) for x in tensors(batches[0])) or "no tensors"
    where = f"a training step on the first batch of --data {config.data}, with shapes {shapes}"
    with blamed(f"MODEL {config.model}: {where}, raised"):
        train(Setup(model, optimizer, loss, batches, 1, config.clip_norm, config.seed).fork())
    facts = {"data": config.data, "loss": name or "", "trained": trained}
    given = {"model": model, "batches": batches, "loss": loss, "optimizer": optimizer}
    own = own_losses(config.losses) if config.losses else None
    return {**given, "own_losses": own, "_facts": facts}, notes


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Return the cross entropy of outputs (…, classes) and targets (…).

    Outputs (samples, classes, …) with targets (samples, …) are accepted, too.
    """
    if target.ndim > 1 and output.shape[:-1] == target.shape:
        return F.cross_entropy(output.flatten(0, -2), target.flatten())
    return F.cross_entropy(output, target)


LOSSES: Mapping[str, Callable[..., Tensor]] = {
    "cross_entropy": cross_entropy,
    **{name: getattr(F, f"{name}_loss") for name in ("nll", "mse", "l1", "smooth_l1", "huber")},
    "binary_cross_entropy_with_logits": F.binary_cross_entropy_with_logits,
}


def _makes_optimizers(found: object) -> bool:
    """Return whether this is a class of optimizers."""
    return isinstance(found, type) and issubclass(found, Optimizer)


_OPTIMIZERS = {name.lower(): x for name, x in vars(torch.optim).items() if _makes_optimizers(x)}


def loss_of(name: str) -> Loss:
    """Return the loss of that name.

    Args:
        name: One of `LOSSES`; or the import path of a loss class such as torch.nn:CrossEntropyLoss,
            of a loss, or of a function, of output and target or of model and batch.

    Raises:
        UsageError: There is no such loss.
    """
    found: Any = LOSSES.get(name) or imported(name, "--loss", LOSSES)
    with blamed(f"--loss {name}"):
        found = found() if inspect.isclass(found) else found
        inspect.signature(found)
        return of_batch(found, name)


def optimizer_of(name: str, arguments: Mapping[str, Any]) -> Optimizer | OptimizerFactory:
    """Return the optimizer of that name, or a function that makes it for a model.

    Args:
        name: Name of a class in torch.optim, in any case ("adamw"); or the import path of an
            optimizer class, called with the parameters and the arguments, of a function, called
            with the model and the arguments, or of an optimizer that exists.
        arguments: Keyword arguments.

    Raises:
        UsageError: There is no such optimizer. The returned function raises it if the optimizer
            can't be made with these arguments.
    """
    if name.lower() == "adamw" and not arguments:
        return adamw
    found: Any = _OPTIMIZERS.get(name.lower()) or imported(name, "--optimizer", _OPTIMIZERS)
    exists = isinstance(found, Optimizer)
    if exists and arguments:
        raise UsageError(f"--optimizer {name}: takes no --optimizer-args: it is made already")

    def made(model: nn.Module) -> Optimizer:
        of = model.parameters() if _makes_optimizers(found) else model
        with blamed(f"--optimizer {name} with --optimizer-args {dict(arguments)}"):
            one: Optimizer = found(of, **arguments)
        return one

    return found if exists else made


def own_losses(file: str) -> dict[int, float]:
    """Read step → loss from a JSON list, Lightning's metrics.csv, or a trainer_state.json.

    A list holds the losses of the steps 0, 1, 2, …. Hugging Face's Trainer logs the mean since its
    last log, which is used for each of these steps.

    Raises:
        UsageError: the file can't be read, or holds no losses.
    """
    text = Path(file).read_text(encoding="utf-8", errors="replace")
    told = "expected a JSON list of numbers, a metrics.csv, or a trainer_state.json"
    with blamed(f"--losses {file}: {told}"):
        losses = _of_json(json.loads(text)) if text.lstrip()[:1] in ("[", "{") else _of_csv(text)
        if not losses:
            raise ValueError("it holds no loss")
    return losses


def _of_json(found: Any) -> dict[int, float]:
    if isinstance(found, list):
        return {step: float(loss) for step, loss in enumerate(found)}
    losses: dict[int, float] = {}
    for entry in found["log_history"]:
        if "loss" in entry:  # its step is the number of complete steps
            losses |= dict.fromkeys(range(len(losses), int(entry["step"])), float(entry["loss"]))
    return losses


def _of_csv(text: str) -> dict[int, float]:
    rows = list(csv.DictReader(text.splitlines()))
    names = [name for name in (rows[0] if rows else ()) if name]
    columns = [n for n in names if "loss" in n and not any(word in n for word in _OTHERS)]
    if not columns:
        raise ValueError(f"no column of losses among {', '.join(names) or 'none'}")
    column = min(columns, key=lambda name: "step" not in name)  # else the first
    seen = ((row.get("step") or number, row[column]) for number, row in enumerate(rows))
    return {int(step): float(loss) for step, loss in seen if loss}


# Batches


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

    kind, _, argument = config.data.partition(":")
    found: Any
    loss: str | None = None
    notes = (_RANDOM,) * (kind == "random")
    with blamed(f"--data {config.data}"):
        if kind in SOURCES:
            shape, source = SOURCES[kind]
            fits = form(model, config, shape)
            samples, classes = source(config, fits, argument)
            if fits.classes is not None and classes > fits.classes:
                raise UsageError(
                    f"--data {config.data} has {classes} classes, the model has {fits.classes} "
                    f"outputs: give it more, as by --model-args '{{\"num_classes\": {classes}}}'"
                )
            loader = loader_of(samples, config.batch_size, config.seed)
            found, loss = (fits.batch(x, label) for x, label in loader), fits.loss
        else:
            found = imported(config.data, "--data", SOURCES)
            found = found() if callable(found) else found
        if is_data_set(found):
            found = loader_of(found, config.batch_size, config.seed)
            notes = (f"--data is a data set: shuffled, in batches of {config.batch_size} "
                     "(--batch-size).",)  # fmt: skip
        found = taken(found, config.steps or MOST_STEPS, device)
        batches = tuple(mapped(batch, moved) for batch in found)
    if kind not in SOURCES and isinstance(batches[0], tuple | list):
        is_real = getattr(batches[0][-1], "is_floating_point", lambda: True)()
        loss = "mse" if is_real else "cross_entropy"
    return batches, loss, notes


def _random(config: Config, fits: Form, argument: str) -> Samples:
    """Return samples, each of which depends on its class and on random numbers.

    Floats are the mean of the class, itself drawn from a normal distribution, plus noise of the
    same size: mean 0, standard deviation 1. The mean of an image is smooth, so that it survives
    pooling. The next token is larger by a number that is the class's, or by up to three more.
    Sequences are one token longer than the model's inputs, so that each token has a next one.
    """
    shape, generator = fits.shape, torch.Generator().manual_seed(config.seed)
    classes = config.num_classes or min(MOST_CLASSES, fits.classes or MOST_CLASSES)
    count = config.batch_size * min(config.steps or MOST_STEPS, _MOST_BATCHES)
    labels = torch.randint(classes, (count,), generator=generator)
    if fits.vocabulary is not None:
        return TensorDataset(_chains(fits, labels, classes, generator), labels), classes
    is_image = len(shape) == 3 and min(shape[1:]) > _PLACES
    size = (shape[0], _PLACES, _PLACES) if is_image else shape
    means = torch.randn(classes, *size, generator=generator)
    if is_image:
        means = F.interpolate(means, shape[1:], mode="bicubic")
        means /= means.std()
    noise = torch.randn(count, *shape, generator=generator)
    return TensorDataset((means[labels] + noise) / 2**0.5, labels), classes


def _chains(fits: Form, labels: Tensor, classes: int, generator: torch.Generator) -> Tensor:
    """Return (samples, tokens + 1) whole numbers below the vocabulary size."""
    assert fits.vocabulary is not None
    words = min(_WORDS, fits.vocabulary)
    first = fits.vocabulary - words  # small numbers are often special tokens
    *places, length = fits.shape
    strides = torch.randint(words, (classes,), generator=generator)[labels]
    size = (len(labels), *places, length + 1)
    steps = torch.randint(_SUCCESSORS, size, generator=generator)
    steps += strides.reshape(-1, *(1 for _ in fits.shape))
    starts = torch.randint(words, (*size[:-1], 1), generator=generator)
    return (starts + steps.cumsum(-1)) % words + first


def _text(config: Config, fits: Form, file: str) -> Samples:
    """Return pieces of a text with the last token of each, and the number of tokens.

    A piece is one token longer than the model's inputs. Each different byte of the file is a token,
    numbered from 0.
    """
    where, vocabulary, length = f"--data text:{file}", fits.vocabulary, fits.shape[0] + 1
    if vocabulary is None or fits.classes is not None or len(fits.shape) != 1:
        raise UsageError(f"{where}: expected a model that predicts the next token of a sequence")
    content = torch.tensor(list(Path(file).read_bytes()))
    different, tokens = torch.unique(content, return_inverse=True)
    if len(tokens) < length:
        raise UsageError(f"{where}: has {len(tokens)} tokens, expected at least {length}")
    if len(different) > vocabulary:
        told = f"has {len(different)} different tokens, the model's vocabulary is {vocabulary}"
        raise UsageError(f"{where}: {told}; give it a larger one by --model-args")
    pieces = tokens[: len(tokens) // length * length].reshape(-1, length)
    return TensorDataset(pieces, pieces[:, -1]), len(different)


def _digits(config: Config, fits: Form, argument: str) -> Samples:
    """Return scikit-learn's 1,797 handwritten digits, 8 × 8 grey values in [0, 1]."""
    found = needed("sklearn.datasets", "--data digits").load_digits()
    images = torch.from_numpy(found.images).float()[:, None] / 16
    return TensorDataset(_adapted(images, fits), torch.from_numpy(found.target).long()), 10


def _of_files(config: Config, fits: Form, root: str) -> Samples:
    """Return CIFAR-10's images to train on, or a folder with one of images for each class."""
    kind, _, _ = config.data.partition(":")
    datasets = needed("torchvision.datasets", f"--data {kind}:")
    to_tensor = needed("torchvision.transforms.functional", f"--data {kind}:").to_tensor

    def sample(image: Any) -> Tensor:
        return _adapted(to_tensor(image)[None], fits)[0]

    with blamed(f"--data {config.data} (--download fetches CIFAR-10)"):
        if kind == "cifar10":
            found = datasets.CIFAR10(root, transform=sample, download=config.download)
        else:
            found = datasets.ImageFolder(root, transform=sample)
    return found, len(found.classes)


def _adapted(images: Tensor, fits: Form) -> Tensor:
    """Bring images (samples, channels, height, width) to the model's inputs.

    (C, H, W): resized, and grey in all channels if there are not as many; (T, K): the rows of a
    grey image as a sequence; (K,): a square grey image with K entries in a row.
    """
    shape = fits.shape
    forms = [shape, (1, *shape), (1, isqrt(shape[0]), isqrt(shape[0]))]
    image = next((f for f in forms if len(f) == 3 and prod(f) == prod(shape)), None)
    if image is None or fits.vocabulary is not None:
        takes = "tokens" if fits.vocabulary else f"inputs of shape {shape}"
        told = "expected (C, H, W), or as many entries as a square grey image has"
        raise UsageError(f"--data: images can't be brought to the model's {takes}; {told}")
    images = F.interpolate(images, image[1:], mode="bilinear", antialias=True)
    if images.shape[1] != image[0]:
        images = images.mean(1, keepdim=True).expand(-1, image[0], -1, -1)
    return images.reshape(-1, *shape)


# Source → the shape of its samples, if the model's own is not known, and what makes them.
SOURCES: Mapping[str, tuple[Shape | None, Callable[[Config, Form, str], Samples]]] = {
    "random": (None, _random),
    "digits": ((1, 8, 8), _digits),
    "cifar10": ((3, 32, 32), _of_files),
    "imagefolder": ((3, 64, 64), _of_files),
    "text": ((32,), _text),
}
