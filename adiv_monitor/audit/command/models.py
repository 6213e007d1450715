"""Models by import path, from timm or transformers, their weights, and what they take and give."""

import copy
import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from adiv_monitor.audit.audit import check_model
from adiv_monitor.audit.command.code import UsageError, blamed, close, imported, needed
from adiv_monitor.audit.command.options import Config
from adiv_monitor.audit.training.setup import first_tensor, seeded

# Arguments of timm.create_model by which it loads pickles that it trusts.
_LOADS = ("checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay")
# An implementation ("attn_implementation": "owner/name") that is code from the hub, in JSON.
_KERNEL = re.compile(r'_implementation": (?:\{[^}]*)?"([^"]*/[^"]*)"')
# Keys under which training loops keep the weights in a checkpoint that holds more than them.
_KEYS = ("state_dict", "model_state_dict", "model", "module")
# Prefixes that wrappers add to every name: Lightning's modules, DistributedDataParallel, compile.
_PREFIXES = ("module.", "_orig_mod.", "model.")


def _timm(name: str, **arguments: Any) -> nn.Module:
    timm = needed("timm", "timm:", "timm")
    if ":" in name or not timm.is_model(name):
        hint = close(name, timm.list_models())
        raise UsageError(f"MODEL timm:{name}: timm {timm.__version__} has no such model{hint}")
    if loads := [x for x in _LOADS if x in arguments]:
        raise UsageError(f"--model-args: {loads[0]} may run code; give --checkpoint FILE instead")
    model: nn.Module = timm.create_model(name, **arguments)
    return model


def _hf(path: str, **arguments: Any) -> nn.Module:
    """Build the model of a config.json, or of one in a folder, with random weights.

    Code and weights from elsewhere are refused. The arguments override those of the file.
    """
    transformers = needed("transformers", "hf:", "transformers")
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    where = f"MODEL hf:{path}: "
    with blamed(f"{where}expected a config.json or its folder (nothing is downloaded)"):
        content = {**json.loads(file.read_text(encoding="utf-8")), **arguments}
    kernel = _KERNEL.search(json.dumps(content))
    if kernel is not None or "auto_map" in content:
        what = "auto_map, code of its own" if kernel is None else f"{kernel[1]}, code of the hub"
        raise UsageError(f"{where}asks for {what}, which is not run; take it out")
    names = content.get("architectures") or []
    kind: Any = getattr(transformers, names[0], None) if len(names) == 1 else None
    if not (inspect.isclass(kind) and issubclass(kind, transformers.PreTrainedModel)):
        raise UsageError(
            f"{where}its architectures are {names}, expected one class of transformers "
            f"""{transformers.__version__}, such as "architectures": ["GPT2LMHeadModel"]"""
        )
    with blamed(f"{where}{names[0]} can't be made of it"):
        made: Any = kind  # the check has narrowed it
        model: nn.Module = made(made.config_class.from_dict(content))
    return model


_MAKERS: Mapping[str, Callable[..., nn.Module]] = {"timm": _timm, "hf": _hf}  # of KIND:NAME


def build(name: str, arguments: Mapping[str, Any]) -> nn.Module:
    """Build the model of that name.

    Args:
        name: The import path of a module class, of a function that returns a module, or of an
            instance; timm:NAME; or hf:PATH of a configuration.
        arguments: Keyword arguments of the class or function, of timm.create_model, or of the
            configuration.

    Raises:
        UsageError: There is no such model, it can't be built, or it has nothing to train.
    """
    kind, _, rest = name.partition(":")
    known = ("torchvision.models.resnet18", "timm:NAME", "hf:PATH")
    maker = _MAKERS.get(kind)
    found: Any = partial(maker, rest) if maker else imported(name, "MODEL", known)
    exists = isinstance(found, nn.Module)
    if exists and arguments:
        raise UsageError(f"MODEL {name}: takes no --model-args: it is made already")
    with blamed(f"MODEL {name}: can't be built with --model-args {dict(arguments)}"):
        model: nn.Module = found(**arguments) if callable(found) and not exists else found
        check_model(model)
    return model


def load(model: nn.Module, path: str, *, trusted: bool = False) -> None:
    """Load the weights of a file into the model, without running code unless the file is trusted.

    Args:
        model: The model to load into.
        path: A .safetensors file, or a file of torch.save with a state dict, or with a dict that
            holds one under one of the usual keys.
        trusted: Whether code that a pickle refers to may run.

    Raises:
        UsageError: The file can't be read, would have to be trusted, or does not fit the model.
    """
    where = f"--checkpoint {path}: "
    state = _state(_read(path, trusted, where))
    if state is None:
        keys = ", ".join(map(repr, _KEYS))
        raise UsageError(f"{where}expected a state dict, or a dict with one under {keys}")
    wanted = model.state_dict()
    for prefix in _PREFIXES:
        if not state.keys() & wanted.keys():
            consume_prefix_in_state_dict_if_present(state, prefix)
    with blamed(f"{where}is of another model or --model-args"):
        model.load_state_dict(state)


def _read(path: str, trusted: bool, where: str) -> Any:
    load: Any = partial(torch.load, map_location="cpu", weights_only=not trusted)
    if path.endswith(".safetensors"):
        load = needed("safetensors.torch", "a .safetensors file").load_file
    try:
        return load(path)
    except Exception as error:
        told = "it is missing, damaged, unfinished, or no file of safetensors or torch.save"
        # torch's own words advise to load the file all the same.
        refused = re.search(r"GLOBAL:? (\S+)", str(error))
        if refused is not None and not trusted:
            told = f"it runs code ({refused[1]}); if you trust its maker: --trust-checkpoint"
        raise UsageError(f"{where}can't be read ({type(error).__name__}): {told}") from error


def _state(content: Any) -> dict[str, Any] | None:
    """Return the state dict that a file holds; None: it holds none."""
    inside = [content[x] for x in _KEYS if x in content] if isinstance(content, Mapping) else []
    for held in (content, *inside):
        if isinstance(held, Mapping) and held and all(map(torch.is_tensor, held.values())):
            return dict(held)
    return None


MOST_CLASSES = 10  # of random data, so that each class has several samples

_SAMPLES = 2  # of the pass that tells the output's shape; batch norm needs more than one
_SIDE = 64  # of images, in pixels, for models that take any
_LENGTH = 32  # tokens, of models of transformers
_MASKED = 0.15  # share of the tokens that BERT's pretraining hides
_IGNORED = -100  # label that transformers' losses leave out

Shape = tuple[int, ...]
Made = Callable[[Tensor, Tensor], Any]  # made of samples and their classes
# (tokens or pixels, classes, number of classes of the head) → the arguments that hold labels
Labels = Callable[[Tensor, Tensor, int], dict[str, Tensor]]


@dataclass(frozen=True)
class Form:
    """How samples and their classes become a batch.

    Attributes:
        shape: Shape of one sample of the model's inputs.
        vocabulary: Inputs are whole numbers below this; None: they are floats.
        batch: The batch of some samples; samples of tokens have one more than the model takes.
        classes: Number of classes that the model tells apart; None: as many as the data have.
        loss: Name of the loss for these targets; None: the model's own.
    """

    shape: Shape
    vocabulary: int | None
    batch: Made
    classes: int | None
    loss: str | None


def form(model: nn.Module, config: Config, usual: Shape | None) -> Form:
    """Choose the targets that fit a model's outputs and the requested loss.

    One number for each of several classes: the sample's class. For tokens: the next token, modulo
    the number of classes if the output has another number than the vocabulary. Anything else:
    values of the output's shape, unless --num-classes or the loss request classes. The values are
    the input itself if the output has its shape, else random values that stand for the sample's
    class. Models of transformers get the labels that their head wants.

    Args:
        model: The model.
        config: The loss, the number of classes, the seed and the shape, if the user gives them.
        usual: Shape of the data's samples.

    Raises:
        UsageError: The shape of the inputs is not known, or the data have other targets than these.
    """
    transformers = sys.modules.get("transformers")
    if transformers is not None and isinstance(model, transformers.PreTrainedModel):
        return _of_transformers(model, config.input_shape)
    shape, words, output = fit(model, config.input_shape, usual)
    # What the loss asks for; one that is no name of ours takes whatever fits the output.
    of_classes = config.loss in ("cross_entropy", "nll")
    of_shares = config.loss == "binary_cross_entropy_with_logits"
    of_values = of_shares or config.loss in ("mse", "l1", "smooth_l1", "huber")

    def made(target: Made, loss: str, classes: int | None = None) -> Form:
        def batch(x: Tensor, label: Tensor) -> Any:
            return x if words is None else x[..., :-1], target(x, label)

        return Form(shape, words, batch, classes, config.loss or loss)

    if words is not None and output[:-1] == shape and not of_values:
        return made(lambda x, label: x[..., 1:] % output[-1], "cross_entropy")
    wanted = of_classes or (config.num_classes if len(output) > 1 else output != (1,))
    if output and wanted and not of_values:
        # The classes are the first dimension of an image, else the last.
        classes, *places = output if len(output) > 2 else output[::-1]
        alike = [-1, *(1 for _ in places)]
        return made(lambda x, y: y.view(alike).expand(-1, *places), "cross_entropy", classes)
    if output == shape and not of_shares:
        return made(lambda x, label: x, "mse")
    if config.data != "random":
        told = f"has classes; the model's outputs {output} need other targets"
        raise UsageError(f"--data {config.data} {told}: give --num-classes, --loss or batches")
    generator = torch.Generator().manual_seed(config.seed)
    drawn = torch.randn(config.num_classes or MOST_CLASSES, *output, generator=generator)
    stand_ins = (drawn > 0).float() if of_shares else drawn
    return made(lambda x, label: stand_ins[label], "mse")


def fit(
    model: nn.Module, shape: Shape | None, usual: Shape | None = None
) -> tuple[Shape, int | None, Shape]:
    """Return the shape of a model's inputs, their vocabulary, and the shape of its output.

    The shapes are those of one sample.

    The inputs are whole numbers if the first layer with weights is an embedding, else floats. Of
    several outputs, the shape is that of the first.

    Args:
        model: The model, of which a copy runs.
        shape: Shape of one sample; None: that of a model of torchvision or timm, else the usual.
        usual: Shape of the data's samples.

    Raises:
        UsageError: The shape is not known, or the model can't take it.
    """
    name = type(model).__name__
    shape = shape or _of_images(model) or usual
    if shape is None:
        told = "give batches with --data module:name, or the shape of one sample with --input-shape"
        raise UsageError(f"{name}: the shape of its inputs is not known; {told}")
    layers = (m for m in model.modules() if not [*m.children()] and [*m.parameters()])
    words: int | None = getattr(next(layers, None), "num_embeddings", None)
    like = next(model.parameters())
    size = (_SAMPLES, *shape)
    told = f"--input-shape {shape}: {name} can't take it; give another one, or batches with --data"
    with blamed(told), torch.no_grad(), seeded(0):
        x = torch.randn(size) if words is None else torch.randint(words, size)
        x = x.to(like.device, like.dtype if words is None else None)
        output = first_tensor(copy.deepcopy(model)(x))
        if output is None or output.shape[:1] != (_SAMPLES,):
            raise ValueError("it gives no output for each sample")
    return shape, words, tuple(output.shape[1:])


def _of_images(model: nn.Module) -> Shape | None:
    """Return the shape of the images that a model of torchvision or timm takes; None for others."""
    config = getattr(model, "pretrained_cfg", None)
    if isinstance(config, dict) and "input_size" in config:
        side = config["input_size"][-1] if config.get("fixed_input_size") else _SIDE
    elif type(model).__module__.startswith("torchvision.models."):
        side = getattr(model, "image_size", _SIDE)
    else:
        return None
    channels = (m.in_channels for m in model.modules() if isinstance(m, nn.Conv2d))
    return next(channels, 3), side, side


def _of_transformers(model: Any, shape: Shape | None) -> Form:
    """Return how samples and their classes become the arguments of a model of transformers."""
    name, main, config = type(model).__name__, model.main_input_name, model.config
    labels = next((_HEADS[ending] for ending in _HEADS if name.endswith(ending)), None)
    if labels is None or main not in ("input_ids", "pixel_values"):
        told = f"expected a model of text or images with a head, one of {', '.join(_HEADS)}"
        raise UsageError(f"{name}: {told}; or give batches with labels by --data module:name")
    words = None
    if main == "input_ids":
        text = config.get_text_config()
        words, longest = text.vocab_size, getattr(text, "max_position_embeddings", 2 * _LENGTH)
        # Half of the maximal length, since some models count positions from an offset.
        usual: Shape = (max(min(_LENGTH, longest // 2), 1),)
    else:
        side = getattr(config, "image_size", None) or _SIDE
        sides = side if isinstance(side, list | tuple) else (side, side)
        usual = (getattr(config, "num_channels", 3), *sides)
    inputs, classes = shape or usual, getattr(config, "num_labels", 0)

    def batch(x: Tensor, label: Tensor) -> dict[str, Tensor]:
        x = x if words is None else x[..., : inputs[-1]]
        return {main: x, **labels(x, label, classes)}

    told_apart = classes if labels is _class and classes > 1 else None
    return Form(inputs, words, batch, told_apart, None)


def _hidden_tokens(x: Tensor, label: Tensor, classes: int) -> dict[str, Tensor]:
    """Replace some tokens by token 0 of the vocabulary; the labels are the replaced tokens."""
    hidden = torch.rand(x.shape, generator=torch.Generator().manual_seed(int(x.sum()))) < _MASKED
    hidden[:, 0] = True  # at least one in each sequence
    return {"input_ids": x.masked_fill(hidden, 0), "labels": x.masked_fill(~hidden, _IGNORED)}


def _class(x: Tensor, label: Tensor, classes: int) -> dict[str, Tensor]:
    return {"labels": label.float() if classes == 1 else label}  # one label is a regression's


# Ending of the class name → function that makes the labels.
_HEADS: Mapping[str, Labels] = {
    **dict.fromkeys(
        ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"),
        lambda x, label, classes: {"labels": x},
    ),
    "ForMaskedLM": _hidden_tokens,
    **dict.fromkeys(("ForSequenceClassification", "ForImageClassification"), _class),
    "ForTokenClassification": lambda x, label, classes: {"labels": x % classes},
}
