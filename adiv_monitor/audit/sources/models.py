"""Models by import path, from timm, or from a configuration of Hugging Face's transformers."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

from adiv_monitor.audit.arguments import check_model
from adiv_monitor.audit.options.usage import UsageError, blamed, needed
from adiv_monitor.audit.sources import huggingface
from adiv_monitor.audit.sources.imported import close, imported

_FORMS = ("torchvision.models.resnet18", "timm:NAME", "hf:PATH")  # of names, besides import paths
# Arguments of timm.create_model by which it loads pickles that it trusts.
_LOADS = ("checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay")


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
    makers: dict[str, Any] = {"timm": _timm, "hf": huggingface.build}
    found: Any = partial(makers[kind], rest) if kind in makers else imported(name, "MODEL", _FORMS)
    exists = isinstance(found, nn.Module)
    if exists and arguments:
        raise UsageError(f"MODEL {name}: takes no --model-args: it is made already")
    with blamed(f"MODEL {name} with --model-args {dict(arguments)}"):
        model: nn.Module = found(**arguments) if callable(found) and not exists else found
        check_model(model)
    return model


def _timm(name: str, **arguments: Any) -> nn.Module:
    timm = needed("timm", "timm:", "timm")
    if ":" in name or not timm.is_model(name):
        hint = close(name, timm.list_models())
        raise UsageError(f"MODEL timm:{name}: timm {timm.__version__} has no such model{hint}")
    if loads := [x for x in _LOADS if x in arguments]:
        raise UsageError(f"--model-args: {loads[0]} may run code; give --checkpoint FILE instead")
    model: nn.Module = timm.create_model(name, **arguments)
    return model
