"""The layers that the benchmark compares, and their inputs."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from adiv_layers import (
    AffineLikeLinear,
    CorrectedMultiheadAttention,
    GradientOnlyConv2d,
    GradientOnlyLinear,
    NormLikeLinear,
    PatchNormConv2d,
)
from timing import here
from torch import Tensor, nn


@dataclass(frozen=True)
class Contest:
    """Layers for the same task on the same input.

    The first of `layers` is the baseline, the next two are the peers. All run in every mode.
    """

    title: str
    shape: tuple[int, ...]
    layers: dict[str, Callable[[], nn.Module]]
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    rounds: int = 25
    backend: str = "inductor"


def linear_contest(rows: int, n_in: int, n_out: int, device: str, dtype: torch.dtype) -> Contest:
    layers: dict[str, Callable[[], nn.Module]] = {
        "Linear": lambda: nn.Linear(n_in, n_out),
        "LayerNorm + Linear": lambda: nn.Sequential(nn.LayerNorm(n_in), nn.Linear(n_in, n_out)),
        "RMSNorm + Linear": lambda: nn.Sequential(nn.RMSNorm(n_in), nn.Linear(n_in, n_out)),
        "AffineLikeLinear": lambda: AffineLikeLinear(n_in, n_out),
        "NormLikeLinear": lambda: NormLikeLinear(n_in, n_out),
        "GradientOnlyLinear": lambda: GradientOnlyLinear(n_in, n_out),
    }
    if dtype == torch.bfloat16:  # the dtype for which their kernels are made
        layers |= third_party(n_in, n_out)
    else:
        batch = "GradientOnlyLinear(batch)"
        layers[batch] = lambda: GradientOnlyLinear(n_in, n_out, form="batch")
    return Contest(f"{rows}, {n_in} → {n_out}", (rows, n_in), layers, device, dtype)


def third_party(n_in: int, n_out: int) -> dict[str, Callable[[], nn.Module]]:
    """Return RMSNorm of another kernel library, imported when the layer is made."""

    def norm_then_linear(module: str, norm: str) -> nn.Module:
        make = getattr(importlib.import_module(module), norm)
        return nn.Sequential(make(n_in), nn.Linear(n_in, n_out))

    return {
        "Liger RMSNorm + Linear": lambda: norm_then_linear(
            "liger_kernel.transformers", "LigerRMSNorm"
        ),
        "quack RMSNorm + Linear": lambda: norm_then_linear("quack.rmsnorm", "QuackRMSNorm"),
    }


def conv_contest(images: int, device: str, dtype: torch.dtype) -> Contest:
    def conv(kind: type[nn.Conv2d] = nn.Conv2d, **settings: str) -> nn.Module:
        return kind(64, 64, 3, padding=1, **settings)

    return Contest(
        f"{images}×64×32×32, k=3 → 64",
        (images, 64, 32, 32),
        {
            "Conv2d": conv,
            "Conv2d + BatchNorm2d": lambda: nn.Sequential(conv(), nn.BatchNorm2d(64)),
            "GroupNorm(1) + Conv2d": lambda: nn.Sequential(nn.GroupNorm(1, 64), conv()),
            "PatchNormConv2d": lambda: conv(PatchNormConv2d),
            "PatchNormConv2d(norm-like)": lambda: conv(PatchNormConv2d, form="norm-like"),
            "GradientOnlyConv2d": lambda: conv(GradientOnlyConv2d),
        },
        device,
        dtype,
    )


class SelfAttention(nn.Module):
    """Self-attention of one input, by the fused function."""

    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return output


def attention_contest(
    batch: int, length: int, width: int, device: str, dtype: torch.dtype
) -> Contest:
    def attention(kind: type[nn.MultiheadAttention], **settings: Any) -> nn.Module:
        return SelfAttention(kind(width, 8, batch_first=True, **settings))

    twin, corrected = nn.MultiheadAttention, CorrectedMultiheadAttention
    standard = dict.fromkeys(("q_proj", "k_proj", "v_proj", "out_proj"), "standard")
    return Contest(
        f"self-attention {batch}×{length}×{width}, 8 heads",
        (batch, length, width),
        {
            "MultiheadAttention": lambda: attention(twin),
            "LayerNorm + MultiheadAttention": lambda: nn.Sequential(
                nn.LayerNorm(width), attention(twin)
            ),
            "RMSNorm + MultiheadAttention": lambda: nn.Sequential(
                nn.RMSNorm(width), attention(twin)
            ),
            "CorrectedMultiheadAttention(standard)": lambda: attention(corrected, **standard),
            "CorrectedMultiheadAttention": lambda: attention(corrected),
            "CorrectedMultiheadAttention(qk_norm)": lambda: attention(corrected, qk_norm=True),
        },
        device,
        dtype,
    )


def mlp_contest(device: str) -> Contest:
    """Return a small network's contest: the number of operations matters more than arithmetic.

    The kernels for few rows (layers/adiv_layers/kernels/small.py) are worthwhile only if, in a CUDA
    graph, the network takes less time with them than with torch's layers.
    """

    def mlp(linear: type[nn.Linear], norm: Callable[[int], nn.Module] | None = None) -> nn.Module:
        layers: list[nn.Module] = []
        for n_in, n_out in ((3072, 32), (32, 32), (32, 10)):
            layers += [norm(n_in)] if norm else []
            layers += [linear(n_in, n_out), nn.Tanh()]
        return nn.Sequential(*layers[:-1])

    layers: dict[str, Callable[[], nn.Module]] = {
        "Linear": lambda: mlp(nn.Linear),
        "LayerNorm + Linear": lambda: mlp(nn.Linear, nn.LayerNorm),
        "RMSNorm + Linear": lambda: mlp(nn.Linear, nn.RMSNorm),
        "AffineLikeLinear": lambda: mlp(AffineLikeLinear),
        "NormLikeLinear": lambda: mlp(NormLikeLinear),
    }
    return Contest("MLP 3072-32-32-10, batch 32", (32, 3072), layers, device)


CUDA = [
    linear_contest(8192, 1024, 4096, "cuda", torch.bfloat16),
    conv_contest(128, "cuda", torch.bfloat16),
    linear_contest(8192, 4096, 4096, "cuda", torch.bfloat16),
    linear_contest(65536, 768, 3072, "cuda", torch.bfloat16),
    mlp_contest("cuda"),
    attention_contest(16, 1024, 1024, "cuda", torch.bfloat16),
]
# As on a GPU, but small and not really compiled: a trial of the measuring code.
TINY = [replace(linear_contest(8, 12, 24, here(), torch.bfloat16), backend="eager")]
CPU = [
    linear_contest(512, 3072, 512, "cpu", torch.float32),
    linear_contest(2048, 768, 3072, "cpu", torch.float32),
    conv_contest(16, "cpu", torch.float32),
    attention_contest(8, 128, 256, "cpu", torch.float32),
    mlp_contest("cpu"),
]
