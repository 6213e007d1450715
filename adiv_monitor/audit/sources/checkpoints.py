"""Loading of weights from a file, which runs no code from it unless the user trusts the file."""

import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from adiv_monitor.audit.options.usage import UsageError, needed, one_line, said

# Keys under which training loops keep the weights in a checkpoint that holds more than them.
_KEYS = ("state_dict", "model_state_dict", "model", "module")
# Prefixes that wrappers add to every name: Lightning's modules, DistributedDataParallel, compile.
_PREFIXES = ("module.", "_orig_mod.", "model.")
_SHOWN = 3


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
    _check(state, wanted, model, path)
    model.load_state_dict(state)


def _read(path: str, trusted: bool) -> Any:
    if not Path(path).is_file():
        raise UsageError(f"--checkpoint {path}: there is no such file")
    try:
        if path.endswith(".safetensors"):
            return needed("safetensors.torch", "a .safetensors file").load_file(path)
        return torch.load(path, map_location="cpu", weights_only=not trusted)
    except UsageError:
        raise
    except pickle.UnpicklingError as error:
        if trusted or (reason := _refusal(error)) is None:
            raise _unreadable(path, error) from error
        raise UsageError(
            f"--checkpoint {path}: refused, because reading it means running code: {reason}. If "
            "you trust whoever made the file: --trust-checkpoint"
        ) from error
    except Exception as error:
        raise _unreadable(path, error) from error


def _refusal(error: pickle.UnpicklingError) -> str | None:
    """Return why torch refused a pickle; None if the error is no refusal.

    A refused pickle refers to objects that plain weights don't need.
    """
    text = str(error)
    asked = re.search(r"GLOBAL:? (\S+)", text)
    if asked is not None:
        return f"it asks for {asked[1]}"
    return one_line(text) if "weights_only" in text and "Unsupported operand" not in text else None


def _unreadable(path: str, error: Exception) -> UsageError:
    return UsageError(
        f"--checkpoint {path}: can't be read, it is damaged, unfinished, or no file of safetensors "
        f"or torch.save: {_own_words(error)}"
    )


def _own_words(error: Exception) -> str:
    """Return torch's description of the error without its advice to load the file all the same."""
    found = re.search(r"WeightsUnpickler error:\s*(.+)", str(error))
    return found[1] if found else said(error)


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


def _check(
    state: Mapping[str, Tensor], wanted: Mapping[str, Tensor], model: nn.Module, path: str
) -> None:
    """Raise UsageError unless names and shapes are the model's."""
    shapes = [
        f"{key} ({tuple(state[key].shape)} instead of {tuple(value.shape)})"
        for key, value in wanted.items()
        if key in state and isinstance(value, Tensor) and state[key].shape != value.shape
    ]
    wrong = {
        "missing": [key for key in wanted if key not in state],
        "not in the model": [key for key in state if key not in wanted],
        "of another shape": shapes,
    }
    told = [f"{len(keys)} {what}: {_some(keys)}" for what, keys in wrong.items() if keys]
    if told:
        raise UsageError(
            f"--checkpoint {path}: does not fit {type(model).__name__}: {'; '.join(told)}. Is it "
            "of this model, with these --model-args?"
        )


def _some(keys: list[str]) -> str:
    return ", ".join(keys[:_SHOWN]) + (", …" if len(keys) > _SHOWN else "")
