"""Models of Hugging Face's transformers, from a configuration, and batches that fit their heads."""

import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from adiv_monitor.audit.options.usage import UsageError, blamed, needed
from adiv_monitor.audit.sources.targets import Form, Inputs

_LENGTH = 32  # tokens
_MASKED = 0.15  # share of the tokens that BERT's pretraining hides
_IGNORED = -100  # label that transformers' losses leave out
_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "spiece.model", "tokenizer.model")
# An implementation ("attn_implementation": "owner/name") that is code from the hub, in JSON.
_KERNEL = re.compile(r'_implementation": (?:\{[^}]*)?"([^"]*/[^"]*)"')

Batch = dict[str, Tensor]
# (tokens or pixels, classes, number of classes of the head) → the arguments that hold labels
Labels = Callable[[Tensor, Tensor, int], Batch]


def build(path: str, **arguments: Any) -> nn.Module:
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
    where = f"MODEL hf:{path}: "
    with blamed(f"{where}expected a config.json or its folder (nothing is downloaded)"):
        content = {**json.loads(file.read_text(encoding="utf-8")), **arguments}
    kernel = _KERNEL.search(json.dumps(content))
    if kernel is not None or "auto_map" in content:
        what = "auto_map, code of its own" if kernel is None else f"{kernel[1]}, code of the hub"
        raise UsageError(f"{where}asks for {what}, which is not run; take it out")
    names = content.get("architectures") or []
    kind: Any = getattr(transformers, names[0], None) if len(names) == 1 else None
    is_model = inspect.isclass(kind) and issubclass(kind, transformers.PreTrainedModel)
    if not is_model:
        raise UsageError(
            f"{where}its architectures are {names}, expected one class of transformers "
            f"""{transformers.__version__}, such as "architectures": ["GPT2LMHeadModel"]"""
        )
    with blamed(f"{where}{names[0]} can't be made of it"):
        model: nn.Module = kind(kind.config_class.from_dict(content))
    return model


def is_pretrained(model: nn.Module) -> bool:
    """Return whether it is a model of transformers, whose forward returns its own loss."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def form(model: Any, shape: tuple[int, ...] | None) -> Form:
    """Return how samples and their classes become the model's keyword arguments.

    Raises:
        UsageError: The main input is neither text nor images, or the model has no known head.
    """
    name, main = type(model).__name__, model.main_input_name
    labels = next((_HEADS[ending] for ending in _HEADS if name.endswith(ending)), None)
    if labels is None or main not in ("input_ids", "pixel_values"):
        raise UsageError(
            f"{name}: expected a model of text or images with a head, one of {', '.join(_HEADS)}; "
            "or give batches (dicts of its arguments, with labels) by --data package.module:name"
        )
    inputs, classes = _inputs(model, shape), getattr(model.config, "num_labels", 0)

    def batch(x: Tensor, label: Tensor) -> Batch:
        x = x if inputs.vocabulary is None else x[..., : inputs.shape[-1]]
        return {main: x, **labels(x, label, classes)}

    return Form(inputs, batch, classes if labels is _class and classes > 1 else None, None)


def _inputs(model: Any, shape: tuple[int, ...] | None) -> Inputs:
    """Return the shape and kind of the model's main input."""
    if model.main_input_name == "input_ids":
        text = model.config.get_text_config()
        longest = getattr(text, "max_position_embeddings", None) or 2 * _LENGTH
        # Half of the maximal length, since some models count positions from an offset.
        return Inputs(shape or (max(min(_LENGTH, longest // 2), 1),), text.vocab_size)
    side = getattr(model.config, "image_size", None) or 64
    height, width = side if isinstance(side, (list, tuple)) else (side, side)
    return Inputs(shape or (getattr(model.config, "num_channels", 3), height, width))


def _tokens(x: Tensor, label: Tensor, classes: int) -> Batch:
    return {"labels": x}


def _hidden_tokens(x: Tensor, label: Tensor, classes: int) -> Batch:
    """Replace some tokens by token 0 of the vocabulary; the labels are the replaced tokens."""
    hidden = torch.rand(x.shape, generator=torch.Generator().manual_seed(int(x.sum()))) < _MASKED
    hidden[:, 0] = True  # at least one in each sequence
    return {"input_ids": x.masked_fill(hidden, 0), "labels": x.masked_fill(~hidden, _IGNORED)}


def _class(x: Tensor, label: Tensor, classes: int) -> Batch:
    return {"labels": label.float() if classes == 1 else label}  # one label is a regression's


def _class_of_each_token(x: Tensor, label: Tensor, classes: int) -> Batch:
    return {"labels": x % classes}


def _span(x: Tensor, label: Tensor, classes: int) -> Batch:
    last = x.shape[1] - 1
    return {"start_positions": label.clamp(max=last), "end_positions": (label + 1).clamp(max=last)}


# Ending of the class name → function that makes the labels.
_HEADS: Mapping[str, Labels] = {
    **dict.fromkeys(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"), _tokens),
    "ForMaskedLM": _hidden_tokens,
    **dict.fromkeys(("ForSequenceClassification", "ForImageClassification"), _class),
    "ForTokenClassification": _class_of_each_token,
    "ForQuestionAnswering": _span,
}


def tokenizer(model_name: str) -> Callable[[str], list[int]] | None:
    """Return the tokenizer beside the configuration of hf:FOLDER; None if there is none."""
    kind, _, folder = model_name.partition(":")
    if kind != "hf" or not any((Path(folder) / name).is_file() for name in _VOCABULARIES):
        return None
    transformers = needed("transformers", "hf:", "transformers")
    with blamed(f"MODEL {model_name}: its tokenizer can't be read"):
        found = transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    return lambda text: list(found(text, verbose=False)["input_ids"])
