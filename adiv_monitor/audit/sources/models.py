"""Models by import path, from timm, or from a configuration of Hugging Face's transformers."""

import copy
from collections.abc import Mapping
from typing import Any

from torch import nn

from adiv_monitor.audit.options.usage import UsageError, blamed, needed
from adiv_monitor.audit.sources import huggingface
from adiv_monitor.audit.sources.imported import close, imported, is_of_file, signature

# Arguments of timm.create_model by which it loads pickles that it trusts.
_LOADS = frozenset({"checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay"})


def is_instance(name: str) -> bool:
    """Return whether the name is that of a module, and not of what makes one."""
    is_path = not name.startswith(("timm:", "hf:"))
    return is_path and isinstance(imported(name, "MODEL"), nn.Module)


def build(name: str, arguments: Mapping[str, Any], *, copies: bool = True) -> nn.Module:
    """Build the model of that name.

    Args:
        name: The import path of a module class, of a function that returns a module, or of an
            instance; timm:NAME; or hf:PATH of a configuration.
        arguments: Keyword arguments of the class or function, of timm.create_model, or of the
            configuration.
        copies: Whether to copy a module that exists, since its weights, device and dtype are set.

    Raises:
        UsageError: There is no such model, it can't be built, or it has nothing to train.
    """
    if name.startswith("timm:"):
        model = _timm(name.removeprefix("timm:"), arguments)
    elif name.startswith("hf:"):
        model = huggingface.build(name.removeprefix("hf:"), arguments)
    else:
        model = _made(name, imported(name, "MODEL"), arguments, copies)
    if not any(p.requires_grad for p in model.parameters()):
        some = any(True for _ in model.parameters())
        what = "only parameters with requires_grad=False" if some else "no parameters"
        raise UsageError(f"MODEL {name}: {type(model).__name__} has {what}: nothing to audit")
    return model


def _made(name: str, found: Any, arguments: Mapping[str, Any], copies: bool) -> nn.Module:
    if isinstance(found, nn.Module):
        if arguments:
            raise UsageError(
                f"MODEL {name}: is an instance of {type(found).__name__}, which takes no "
                "--model-args; give a class or function, or leave them out"
            )
        return copy.deepcopy(found) if copies else found
    if not callable(found):
        raise UsageError(
            f"MODEL {name}: got a {type(found).__name__}, expected a torch.nn.Module, its class, "
            "or a function that returns one"
        )
    given = f"--model-args {dict(arguments)}{signature(found)}"
    with blamed(f"MODEL {name}: can't be made with {given}"):
        model = found(**arguments)
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"MODEL {name}: calling it gave {type(model).__name__}, expected a torch.nn.Module"
        )
    return model


def _timm(name: str, arguments: Mapping[str, Any]) -> nn.Module:
    if is_of_file("--model-args") and (loads := sorted(_LOADS.intersection(arguments))):
        raise UsageError(
            f"--config: model_args: got {loads[0]}, by which timm runs code of files; expected "
            "checkpoint: FILE, or --model-args on the command line"
        )
    timm = needed("timm", "timm:", "timm")
    if ":" in name or not timm.is_model(name):
        hint = close(name, timm.list_models())
        raise UsageError(f"MODEL timm:{name}: timm {timm.__version__} has no such model{hint}")
    with blamed(f"MODEL timm:{name}: can't be made with --model-args {dict(arguments)}"):
        model: nn.Module = timm.create_model(name, **arguments)
    return model
