"""Loading of weights from a file, which runs no code from it unless the user trusts the file."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

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
    state = _state(_read(path, trusted), path)
    wanted = model.state_dict()
    for prefix in _PREFIXES:
        if all(key.startswith(prefix) for key in state) and not state.keys() & wanted.keys():
            state = {key.removeprefix(prefix): value for key, value in state.items()}
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise UsageError(
            f"--checkpoint {path}: does not fit {type(model).__name__}: {one_line(error)}. Is it "
            "of this model, with these --model-args?"
        ) from error


def _read(path: str, trusted: bool) -> Any:
    where = f"--checkpoint {path}: "
    if not Path(path).is_file():
        raise UsageError(f"{where}there is no such file")
    try:
        if path.endswith(".safetensors"):
            return needed("safetensors.torch", "a .safetensors file").load_file(path)
        return torch.load(path, map_location="cpu", weights_only=not trusted)
    except UsageError:
        raise
    except Exception as error:
        # torch's own words advise to load the file all the same.
        refused = re.search(r"GLOBAL:? (\S+)", str(error))
        if refused is not None and not trusted:
            raise UsageError(
                f"{where}refused, because reading it means running code: it asks for {refused[1]}. "
                "If you trust whoever made the file: --trust-checkpoint"
            ) from error
        raise UsageError(
            f"{where}can't be read ({type(error).__name__}): it is damaged, unfinished, or no file "
            "of safetensors or torch.save"
        ) from error


def _state(content: Any, path: str) -> Mapping[str, Tensor]:
    if isinstance(content, nn.Module):  # only a trusted file holds one
        return content.state_dict()
    if isinstance(content, Mapping):
        for held in (content, *(content[key] for key in _KEYS if key in content)):
            if isinstance(held, nn.Module):
                return held.state_dict()
            if isinstance(held, Mapping) and held and _holds_tensors(held):
                return dict(held)
        got = "a dict of " + (", ".join(map(repr, list(content)[:8])) or "nothing")
    else:
        got = f"a {type(content).__name__}"
    raise UsageError(
        f"--checkpoint {path}: got {one_line(got)}, expected a state dict, or a dict with one "
        "under " + ", ".join(map(repr, _KEYS))
    )


def _holds_tensors(held: Mapping[Any, Any]) -> bool:
    return all(
        isinstance(key, str) and (isinstance(value, Tensor) or key.endswith("_extra_state"))
        for key, value in held.items()
    )
