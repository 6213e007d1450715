"""Replacement of the linear layers of any model by corrected ones, and back."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal

from torch import nn

from adiv_layers.attention import CorrectedMultiheadAttention
from adiv_layers.convolutions import (
    GradientOnlyConv2d,
    PatchNormConv1d,
    PatchNormConv2d,
    PatchNormConv3d,
)
from adiv_layers.modules import AffineLikeLinear, GradientOnlyLinear, NormLikeLinear

Target = Literal[
    "standard",
    "affine-like",
    "norm-like",
    "gradient-only",
    "gradient-only-disproportional",
    "gradient-only-batch",
]
LayerChoice = Collection[str] | Callable[[str, nn.Module], bool] | None

_CONVOLUTIONS: tuple[tuple[type[nn.Module], type[nn.Module]], ...] = (
    (nn.Conv1d, PatchNormConv1d),
    (nn.Conv2d, PatchNormConv2d),
    (nn.Conv3d, PatchNormConv3d),
)
# For each target: torch's layer → the class that replaces it, and that class's settings.
_REPLACEMENTS: dict[str, dict[type[nn.Module], tuple[type[nn.Module], dict[str, str]]]] = {
    "standard": {twin: (twin, {}) for twin in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)},
    "affine-like": {nn.Linear: (AffineLikeLinear, {})}
    | {twin: (patch_norm, {"form": "affine-like"}) for twin, patch_norm in _CONVOLUTIONS},
    "norm-like": {nn.Linear: (NormLikeLinear, {})}
    | {twin: (patch_norm, {"form": "norm-like"}) for twin, patch_norm in _CONVOLUTIONS},
    "gradient-only": {
        nn.Linear: (GradientOnlyLinear, {"form": "proportional"}),
        nn.Conv2d: (GradientOnlyConv2d, {"form": "proportional"}),
    },
    "gradient-only-disproportional": {
        nn.Linear: (GradientOnlyLinear, {"form": "disproportional"}),
        nn.Conv2d: (GradientOnlyConv2d, {"form": "disproportional"}),
    },
    "gradient-only-batch": {nn.Linear: (GradientOnlyLinear, {"form": "batch"})},
}
_TWINS: dict[type[nn.Module], type[nn.Module]] = {
    replacement: twin
    for replacements in _REPLACEMENTS.values()
    for twin, (replacement, _) in replacements.items()
}
_CORRECTIONS = ("alpha", "beta", "form", "eps", "damping")


@dataclass
class ConversionReport:
    """The result of `convert`, with the way to revert it.

    Attributes:
        to: target of the conversion.
        swapped: module path → "old class → new class".
        left: path of a module with its own parameters that was not swapped → reason.
    """

    to: str
    swapped: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    _undo: list[Callable[[], None]] = field(default_factory=list, repr=False)
    _new: dict[str, nn.Module] = field(default_factory=dict, repr=False)

    def revert(self) -> None:
        """Restore the old layers, with the current parameters.

        Raises:
            RuntimeError: a new layer was parametrized or pruned since; nothing is changed.
        """
        made = [path for path, new in self._new.items() if not _is_plain(new)]
        if self._undo and made:
            raise RuntimeError(
                f"ConversionReport.revert: the weight of {made[0]!r} is computed from other "
                "parameters since (weight norm, pruning, …): remove that first."
            )
        while self._undo:
            self._undo.pop()()

    def __str__(self) -> str:
        lines = [f"to {self.to}: {len(self.swapped)} swapped, {len(self.left)} left"]
        width = max((len(path) for path in (*self.swapped, *self.left)), default=0)
        lines += [f"  swapped  {path:{width}}  {what}" for path, what in self.swapped.items()]
        lines += [f"  left     {path:{width}}  {why}" for path, why in self.left.items()]
        return "\n".join(lines)


def convert(
    model: nn.Module, to: Target, layers: LayerChoice = None, *, attention: bool = False
) -> ConversionReport:
    """Replace linear layers and convolutions of a model in place.

    A new layer takes over the full state of the old one: the same parameter objects (existing
    optimizers stay valid, tied weights stay tied), hooks, mode, and attributes set by the user.

    Args:
        model: the model, whose layers are replaced in place.
        to: "affine-like" or "norm-like" (structural: the model's outputs change),
            "gradient-only" (proportional), "gradient-only-disproportional" or
            "gradient-only-batch" (outputs unchanged), or "standard" for torch's own layers.
        layers: glob patterns over module paths, or a predicate (path, module) → bool; all if None.
        attention: whether to split the packed weight of `nn.MultiheadAttention` into three new
            parameters, so that its projections can be replaced: build the optimizer afterwards.

    Returns:
        A report of the replaced modules and the others with reasons, with a method `revert()`.

    Raises:
        ValueError: the target is unknown, or a pattern matches no module.
    """
    if to not in _REPLACEMENTS:
        known = ", ".join(map(repr, _REPLACEMENTS))
        raise ValueError(f"convert: to={to!r}; must be one of {known}.")
    chosen = _choice(model, layers)
    report = ConversionReport(to)
    if attention:
        _open_attention(model, chosen, report)
    new_layers: dict[nn.Module, nn.Module] = {}
    for path, module in list(model.named_modules(remove_duplicate=False)):
        parent = model.get_submodule(path.rpartition(".")[0])
        why = _why_not(path, module, parent, to) if chosen(path, module) else "not chosen"
        if why is None:
            if module not in new_layers:
                new_layers[module] = _successor(module, to)
            _swap(parent, path, new_layers[module], report)
        elif any(parameter is not None for parameter in module._parameters.values()):
            report.left[path] = why
    _leave_fast_paths(model, report)
    return report


def _choice(model: nn.Module, layers: LayerChoice) -> Callable[[str, nn.Module], bool]:
    """Return the choice of layers as a predicate."""
    if layers is None:
        return lambda path, module: True
    if callable(layers):
        return layers
    patterns = [layers] if isinstance(layers, str) else list(layers)
    paths = [path for path, _ in model.named_modules(remove_duplicate=False)]
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path in paths):
            some = ", ".join(map(repr, paths[1:6]))
            raise ValueError(
                f"convert: layers has {pattern!r}, which matches no module; paths are like {some}."
            )
    return lambda path, module: any(fnmatchcase(path, pattern) for pattern in patterns)


def _why_not(path: str, module: nn.Module, parent: nn.Module, to: str) -> str | None:
    """Return the reason not to replace a module; None if it can be replaced."""
    twin = _twin(module)
    if isinstance(module, nn.MultiheadAttention) and not _is_open(module):
        return "its weights are packed into one parameter: attention=True opens it up"
    if isinstance(module, nn.modules.lazy.LazyModuleMixin) and twin is None:
        return "lazy: run a batch through the model first"
    if nn.utils.parametrize.is_parametrized(module):
        return "parametrized: convert first, then parametrize"
    if twin is None and isinstance(module, tuple(_TWINS)):
        return f"{type(module).__name__} is a subclass with a forward of its own"
    if twin is None:
        return f"{type(module).__name__} is no linear layer or convolution"
    if "forward" in vars(module):
        return "its forward was replaced (by the hooks of another library?): convert first"
    if module._compiled_call_impl is not None:
        return "compiled: convert first, then compile"
    if not _is_plain(module):
        return "its weight is computed from other parameters (weight norm, pruning, …)"
    if module.weight.is_complex():  # type: ignore[operator]
        return "its weight is complex"
    if not path:
        return "it is the model itself: construct the corrected layer instead"
    if isinstance(parent, nn.MultiheadAttention) and not _is_open(parent):
        return "nn.MultiheadAttention uses its weight without calling it"
    if twin not in _REPLACEMENTS[to]:
        return f"there is no {to} {twin.__name__}"
    return None


def _is_plain(module: nn.Module) -> bool:
    """Return whether the parameters of a layer are those of torch's layer."""
    if _is_open(module):
        return all(isinstance(part, nn.Linear) and _is_plain(part) for part in module.children())
    return set(module._parameters) == {"weight", "bias"}


def _twin(module: nn.Module) -> type[nn.Module] | None:
    """Return the torch class that this layer is, or corrects; None if there is none."""
    if type(module) is nn.modules.linear.NonDynamicallyQuantizableLinear:
        return nn.Linear
    return _TWINS.get(type(module))


def _is_open(module: nn.Module) -> bool:
    return isinstance(module, CorrectedMultiheadAttention)


def _successor(old: nn.Module, to: str) -> nn.Module:
    """Return the new layer, which shares all state with the old one."""
    twin = _twin(old)
    assert twin is not None  # guaranteed by _why_not
    replacement, settings = _REPLACEMENTS[to][twin]
    # These sizes and parameters are placeholders, overwritten by those of the old layer.
    sizes = (1, 1) if twin is nn.Linear else (1, 1, 1)
    new = replacement(*sizes, device="meta", **settings)
    state = {name: value for name, value in vars(old).items() if name not in _CORRECTIONS}
    vars(new).update(state)
    return new


def _swap(parent: nn.Module, path: str, new: nn.Module, report: ConversionReport) -> None:
    name = path.rpartition(".")[2]
    old = parent._modules[name]
    assert old is not None

    def undo() -> None:
        old.training = new.training
        parent._modules[name] = old

    parent._modules[name] = report._new[path] = new
    report._undo.append(undo)
    what = f"{type(old).__name__} → {type(new).__name__}"
    form = getattr(new, "form", None)
    report.swapped[path] = what if form is None else f"{what} ({form})"


def _open_attention(
    model: nn.Module, chosen: Callable[[str, nn.Module], bool], report: ConversionReport
) -> None:
    """Replace `nn.MultiheadAttention` modules by ones with four separate standard projections."""
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if type(module) is nn.MultiheadAttention and path and chosen(path, module):
            parent = model.get_submodule(path.rpartition(".")[0])
            new = _opened(module)
            _swap(parent, path, new, report)
            report._undo.append(partial(_take_back, module, new))


def _opened(old: nn.MultiheadAttention) -> CorrectedMultiheadAttention:
    new = CorrectedMultiheadAttention(
        old.embed_dim,
        old.num_heads,
        old.dropout,
        bias=old.in_proj_bias is not None,
        add_bias_kv=old.bias_k is not None,
        add_zero_attn=old.add_zero_attn,
        kdim=old.kdim,
        vdim=old.vdim,
        batch_first=old.batch_first,
        device="meta",
        q_proj="standard",
        k_proj="standard",
        v_proj="standard",
        out_proj="standard",
    )
    state = {name: value.clone() for name, value in old.state_dict().items()}
    new.load_state_dict(state, assign=True)
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(old, f"{name}_weight")
        weight = old.in_proj_weight if weight is None else weight
        projection = new.get_submodule(name)
        for new_one, old_one in ((projection.weight, weight), (projection.bias, old.in_proj_bias)):
            if isinstance(new_one, nn.Parameter):
                new_one.requires_grad_(old_one.requires_grad)
    new.out_proj._parameters = old.out_proj._parameters
    new.bias_k, new.bias_v = old.bias_k, old.bias_v
    for name, value in vars(old).items():
        if name.endswith("_hooks") and "state_dict" not in name:
            vars(new)[name] = value
    return new.train(old.training)


def _take_back(old: nn.MultiheadAttention, new: CorrectedMultiheadAttention) -> None:
    old.load_state_dict(new.state_dict())


def _leave_fast_paths(model: nn.Module, report: ConversionReport) -> None:
    """Disable fast paths of torch's transformers that read weights without calling the layer."""
    for path, module in model.named_modules():
        inside = f"{path}." if path else ""
        if not any(swapped.startswith(inside) for swapped in report.swapped):
            continue
        if isinstance(module, nn.TransformerEncoderLayer):
            _set(module, "activation_relu_or_gelu", 0, report)
        elif isinstance(module, nn.TransformerEncoder):
            _set(module, "use_nested_tensor", False, report)


def _set(module: nn.Module, name: str, value: Any, report: ConversionReport) -> None:
    before = getattr(module, name)
    report._undo.append(lambda: setattr(module, name, before))
    setattr(module, name, value)
