"""Models by import path, from timm or a configuration of transformers, and weights from a file."""

import inspect
import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from adiv_monitor.audit.arguments import check_model
from adiv_monitor.audit.command.code import UsageError, blamed, close, imported, needed, one_line

# Arguments of timm.create_model by which it loads pickles that it trusts.
_LOADS = ("checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay")
# An implementation ("attn_implementation": "owner/name") that is code from the hub, in JSON.
_KERNEL = re.compile(r'_implementation": (?:\{[^}]*)?"([^"]*/[^"]*)"')
_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "spiece.model", "tokenizer.model")
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
        if all(key.startswith(prefix) for key in state) and not state.keys() & wanted.keys():
            state = {key.removeprefix(prefix): value for key, value in state.items()}
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        told = one_line(error)
        raise UsageError(f"{where}is of another model or --model-args: {told}") from error


def _read(path: str, trusted: bool, where: str) -> Any:
    try:
        if path.endswith(".safetensors"):
            return needed("safetensors.torch", "a .safetensors file").load_file(path)
        return torch.load(path, map_location="cpu", weights_only=not trusted)
    except UsageError:
        raise
    except Exception as error:
        told = "it is missing, damaged, unfinished, or no file of safetensors or torch.save"
        # torch's own words advise to load the file all the same.
        refused = re.search(r"GLOBAL:? (\S+)", str(error))
        if refused is not None and not trusted:
            told = f"it runs code ({refused[1]}); if you trust its maker: --trust-checkpoint"
        raise UsageError(f"{where}can't be read ({type(error).__name__}): {told}") from error


def _state(content: Any) -> Mapping[str, Any] | None:
    """Return the state dict that a file holds; None: it holds none."""
    inside = [content[x] for x in _KEYS if x in content] if isinstance(content, Mapping) else []
    for held in (content, *inside):
        state = held.state_dict() if isinstance(held, nn.Module) else held
        if isinstance(state, Mapping) and state and all(map(torch.is_tensor, state.values())):
            return state
    return None
