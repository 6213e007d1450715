"""Models of Hugging Face's transformers, from a configuration, and batches that fit their heads."""

import inspect
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from adiv_monitor.audit.options.usage import UsageError, blamed, needed
from adiv_monitor.audit.sources.shapes import Inputs

_LENGTH = 32  # tokens
_MASKED = 0.15  # share of the tokens that BERT's pretraining hides
_IGNORED = -100  # label that transformers' losses leave out

Batch = dict[str, Tensor]
# (tokens or pixels, classes, number of classes of the head) → the arguments that hold labels
Labels = Callable[[Tensor, Tensor, int], Batch]


def build(path: str, arguments: Mapping[str, Any]) -> nn.Module:
    """Build the model of a configuration, with random weights.

    Args:
        path: Path of a config.json, or of its folder.
        arguments: Arguments of the configuration, which override the file's.

    Raises:
        UsageError: There is no such file, it needs code or weights from elsewhere, or transformers
            can't build a model from it.
    """
    transformers = needed("transformers", "hf:", "transformers")
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    where = f"MODEL hf:{path}"
    content = _content(file, where, arguments)
    names = content.get("architectures") or []
    kind: Any = getattr(transformers, names[0], None) if len(names) == 1 else None
    is_model = inspect.isclass(kind) and issubclass(kind, transformers.PreTrainedModel)
    if not is_model:
        raise UsageError(
            f"{where}: its architectures are {names}, expected one class of transformers "
            f"""{transformers.__version__}, such as "architectures": ["GPT2LMHeadModel"]"""
        )
    with blamed(f"{where}: {names[0]} can't be made of it"):
        model: nn.Module = kind(kind.config_class.from_dict(content))
    return model


def _content(file: Path, where: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with these arguments; it asks for no code from elsewhere."""
    if not file.is_file():
        raise UsageError(
            f"{where}: there is no file {file}; expected a config.json or its folder (nothing is "
            "downloaded)"
        )
    with blamed(f"{where}: {file} is no JSON"):
        content = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise UsageError(f"{where}: {file} holds a {type(content).__name__}, expected an object")
    content |= arguments
    if "auto_map" in content:
        raise UsageError(
            f"{where}: the model brings code of its own, which is not run; give the import path of "
            "a function of yours that builds it"
        )
    if (kernel := _kernel(content)) is not None:
        raise UsageError(
            f"{where}: asks for {kernel!r}, code from the hub, which is not run; take it out of "
            f"{file.name}"
        )
    return content


def _kernel(content: Any) -> str | None:
    """Return the first hub kernel ("owner/name") in a configuration, at any depth, or None."""
    if not isinstance(content, dict):
        return None
    for key, value in content.items():
        if key.endswith("_implementation") or key == "attn_implementation":
            values = value.values() if isinstance(value, dict) else [value]
            if hub := [v for v in values if isinstance(v, str) and "/" in v]:
                return hub[0]
        if (deeper := _kernel(value)) is not None:
            return deeper
    return None


def is_pretrained(model: nn.Module) -> bool:
    """Return whether it is a model of transformers, whose forward returns its own loss."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def inputs(model: Any, shape: tuple[int, ...] | None) -> Inputs:
    """Return the shape and kind of the model's main input.

    Raises:
        UsageError: The main input is neither text nor images.
    """
    kind, config = type(model).__name__, model.config
    if model.main_input_name == "input_ids":
        text = config.get_text_config()
        longest = getattr(text, "max_position_embeddings", None) or 2 * _LENGTH
        # Half of the maximal length, since some models count positions from an offset.
        return Inputs(shape or (max(min(_LENGTH, longest // 2), 1),), text.vocab_size)
    if model.main_input_name == "pixel_values":
        side = getattr(config, "image_size", None) or 64
        height, width = side if isinstance(side, (list, tuple)) else (side, side)
        return Inputs(shape or (getattr(config, "num_channels", 3), height, width))
    raise UsageError(
        f"{kind} takes {model.main_input_name!r}, for which there is no data here: give batches "
        "(dicts of its arguments, with labels) by --data package.module:function"
    )


def _tokens(x: Tensor, label: Tensor, classes: int) -> Batch:
    return {"labels": x}


def _hidden_tokens(x: Tensor, label: Tensor, classes: int) -> Batch:
    """Replace some tokens by token 0 of the vocabulary; the labels are the replaced tokens."""
    hidden = torch.rand(x.shape, generator=torch.Generator().manual_seed(int(x.sum()))) < _MASKED
    hidden[:, 0] = True  # at least one in each sequence
    return {"input_ids": x.masked_fill(hidden, 0), "labels": x.masked_fill(~hidden, _IGNORED)}


def _class(x: Tensor, label: Tensor, classes: int) -> Batch:
    if classes == 1:  # transformers takes one label for a regression
        return {"labels": label.float()}
    return {"labels": label}


def _class_of_each_token(x: Tensor, label: Tensor, classes: int) -> Batch:
    return {"labels": x % classes}


def _span(x: Tensor, label: Tensor, classes: int) -> Batch:
    last = x.shape[1] - 1
    return {"start_positions": label.clamp(max=last), "end_positions": (label + 1).clamp(max=last)}


# Ending of the class name → function that makes the labels.
_HEADS: Mapping[str, Labels] = {
    "ForCausalLM": _tokens,
    "LMHeadModel": _tokens,
    "ForConditionalGeneration": _tokens,
    "ForMaskedLM": _hidden_tokens,
    "ForSequenceClassification": _class,
    "ForImageClassification": _class,
    "ForTokenClassification": _class_of_each_token,
    "ForQuestionAnswering": _span,
}
_WITHOUT_CLASSES = (_tokens, _hidden_tokens)


def labels(model: Any) -> Labels:
    """Return the function that makes the labels for the model's head.

    Raises:
        UsageError: The model has no known head.
    """
    name = type(model).__name__
    for ending, found in _HEADS.items():
        if name.endswith(ending):
            return found
    raise UsageError(
        f"{name}: expected a head that gives a loss, one of {', '.join(_HEADS)}; or give batches "
        "(dicts of its arguments, with labels) by --data package.module:function"
    )


def classes(model: Any) -> int | None:
    """Return the number of classes of the model's head; None if its only classes are tokens."""
    return None if labels(model) in _WITHOUT_CLASSES else model.config.num_labels


def batch(model: Any, x: Tensor, label: Tensor) -> Batch:
    """Return the model's keyword arguments for some samples and their classes."""
    name = model.main_input_name
    return {name: x, **labels(model)(x, label, classes(model) or 0)}


def tokenizer(model_name: str) -> Callable[[str], list[int]] | None:
    """Return the tokenizer beside the configuration of hf:FOLDER; None if there is none."""
    folder = Path(model_name.removeprefix("hf:"))
    names = ("tokenizer.json", "vocab.json", "vocab.txt", "spiece.model", "tokenizer.model")
    if not model_name.startswith("hf:") or not any((folder / name).is_file() for name in names):
        return None
    transformers = needed("transformers", "hf:", "transformers")
    with blamed(f"MODEL {model_name}: its tokenizer can't be read"):
        found = transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    return lambda text: list(found(text, verbose=False)["input_ids"])
