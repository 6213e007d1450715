"""Loading of weights from a file, which runs no code from it unless the user trusts the file."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from adiv_monitor.audit.options.usage import UsageError, needed, one_line

# Keys under which training loops keep the weights in a checkpoint that holds more than them.
_KEYS = ("state_dict", "model_state_dict", "model", "module")
# Prefixes that wrappers add to every name: Lightning's modules, DistributedDataParallel, compile.
_PREFIXES = ("module.", "_orig_mod.", "model.")


def load(model: nn.Module, path: str, *, trusted: bool = False) -> None:
    """Load the weights of a file into the model.

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
        raise UsageError(
            f"{where}is of another model or --model-args: {one_line(error)}"
        ) from error


def _read(path: str, trusted: bool, where: str) -> Any:
    is_safe = path.endswith(".safetensors")
    read = needed("safetensors.torch", "a .safetensors file").load_file if is_safe else torch.load
    try:
        return read(path) if is_safe else read(path, map_location="cpu", weights_only=not trusted)
    except Exception as error:
        # torch's own words advise to load the file all the same.
        refused = re.search(r"GLOBAL:? (\S+)", str(error))
        if refused is not None and not trusted:
            told = f"it runs code ({refused[1]}); if you trust its maker: --trust-checkpoint"
        else:
            told = "it is missing, damaged, unfinished, or no file of safetensors or torch.save"
        raise UsageError(f"{where}can't be read ({type(error).__name__}): {told}") from error


def _state(content: Any) -> Mapping[str, Any] | None:
    """Return the state dict that a file holds; None: it holds none."""
    inside = [content[x] for x in _KEYS if x in content] if isinstance(content, Mapping) else []
    for held in (content, *inside):
        state = held.state_dict() if isinstance(held, nn.Module) else held
        if isinstance(state, Mapping) and state and all(map(torch.is_tensor, state.values())):
            return state
    return None
