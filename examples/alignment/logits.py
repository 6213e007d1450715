"""What attentions compare: the logits q·k times their scale, in the probe's forward pass."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from adiv_monitor.alignment import Probe

_MOST_SAMPLES = 8
_ROUNDING = 0.01
_PRODUCTS = ("matmul", "__matmul__", "bmm", "baddbmm")


@dataclass(frozen=True, eq=False)
class Logits:
    """The logits of one attention.

    Attributes:
        values: of a few samples, masked ones as well.
        head_size: d, over how many entries q·k is summed.
        scale: by what q·k is multiplied.
    """

    values: Tensor
    head_size: int
    scale: float

    def record(self, before: "Logits") -> dict[str, float]:
        """RMS now and of the change since, as `AlignmentReading.to_dict` has them of layers."""
        change = self.values - before.values
        return {
            "output_rms": float(self.values.square().mean().sqrt()),
            "output_change_rms": float(change.square().mean().sqrt()),
            "head_size": self.head_size,
            "scale": self.scale,
        }


def read_logits(model: nn.Module, probe: Probe) -> dict[str, Logits]:
    """The logits of all attentions, by path of the module that runs them.

    Seen are calls of `F.scaled_dot_product_attention`, and softmaxes of what a product of two
    activations is when it is scaled and masked. The pass runs in evaluation mode.
    """
    was_training = model.training
    args, kwargs = probe.arguments
    with torch.no_grad(), _Watch(model) as watch:
        model.eval()(*args, **kwargs)
    model.train(was_training)
    return watch.found


class _Watch(TorchFunctionMode):
    """Finds the logits of each attention that runs in the context."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.found: dict[str, Logits] = {}
        self._model = model
        self._hooks: list[Any] = []
        self._within: list[str] = [""]
        self._product: tuple[Tensor, int] | None = None  # the last of two activations, and d

    def __enter__(self) -> "_Watch":
        for path, module in self._model.named_modules():
            self._hooks += [
                module.register_forward_pre_hook(partial(self._enter, path)),
                module.register_forward_hook(self._leave, always_call=True),
            ]
        fused = F.scaled_dot_product_attention

        def seen(*args: Any, **kwargs: Any) -> Tensor:
            self._add(self._within[-1], *_fused(args, kwargs))
            return fused(*args, **kwargs)

        # `F.multi_head_attention_forward` hides its calls from a function mode.
        F.scaled_dot_product_attention = seen
        self._fused = fused
        return super().__enter__()

    def _enter(self, path: str, module: nn.Module, args: Any) -> None:
        self._within.append(path)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._within.pop()

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)
        F.scaled_dot_product_attention = self._fused
        for hook in self._hooks:
            hook.remove()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        path, name = self._within[-1], getattr(func, "__name__", "")
        if name in _PRODUCTS and isinstance(result, Tensor):
            factors = [x for x in args if isinstance(x, Tensor)][-2:]
            if result.dim() > 2 and not any(isinstance(x, nn.Parameter) for x in factors):
                self._product = result.detach(), factors[0].shape[-1]
        elif name == "softmax" and self._product is not None and isinstance(result, Tensor):
            product, d = self._product
            if product.numel() == result.numel():
                product, given = product.view(result.shape), args[0]
                seen = (result > 0) & (product != 0)
                self._add(path, product, d, float((given[seen] / product[seen]).median()))
                self._product = None
        return result

    def _add(self, path: str, product: Tensor, d: int, scale: float) -> None:
        name, count = f"{path} logits".strip(), 2
        while name in self.found:
            name, count = f"{path} logits {count}".strip(), count + 1
        self.found[name] = Logits(product[:_MOST_SAMPLES].float() * scale, d, scale)


def _fused(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, int, float]:
    """Products of queries and keys, their size, and the scale."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    query, key, scale = given["query"], given["key"], given.get("scale")
    query, key = query[:_MOST_SAMPLES].detach(), key[:_MOST_SAMPLES].detach()
    if given.get("enable_gqa"):
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    d = query.shape[-1]
    return query @ key.mT, d, d**-0.5 if scale is None else float(scale)


def scale_named(head_sizes: Mapping[int, int], scales: Mapping[int, float]) -> str:
    """How logits are scaled at these widths: q·k/√d, q·k/d, or otherwise.

    Args:
        head_sizes: width → d.
        scales: width → by what q·k is multiplied.
    """
    sizes = sorted(set(head_sizes.values()))
    spread = f"d {sizes[0]}" if len(sizes) == 1 else f"d {sizes[0]} to {sizes[-1]}"
    if set(scales.values()) == {1.0}:
        return f"softmax of q·k as it is (the scale, if any, is in q or k), {spread}"
    for name, power in (("q·k/√d", 0.5), ("q·k/d", 1.0)):
        factors = [scales[width] * d**power for width, d in head_sizes.items()]
        is_one = abs(factors[0] - 1) < _ROUNDING
        if max(factors) < (1 + _ROUNDING) * min(factors) and (is_one or len(sizes) > 1):
            return f"{name if is_one else f'{factors[0]:.3g} {name}'}, {spread}"
    return f"q·k times {min(scales.values()):.3g} to {max(scales.values()):.3g}, {spread}"
