# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The change of a parameter in an optimizer step, and its products, in one pass."""

import torch
import triton
import triton.language as tl
from adiv_layers.kernels.launch import divide_up, run
from torch import Tensor

from adiv_monitor.kernels.views import lies_alike

_BLOCK, _CHUNK = 1024, 8192  # entries at once, and entries of a program


@triton.jit
def step_products_kernel(
    before, now, gamma, taken, norms, products, size, BLOCK: tl.constexpr, CHUNK: tl.constexpr
):
    """Write taken = before − now, possibly over `before`; and norms and products of its parts."""
    start = tl.program_id(0).to(tl.int64) * CHUNK
    square = tl.zeros((BLOCK,), tl.float32)
    product = tl.zeros((BLOCK,), tl.float32)
    for further in range(0, CHUNK, BLOCK):
        place = start + further + tl.arange(0, BLOCK)
        mask = place < size
        was = tl.load(before + place, mask=mask, other=0.0).to(tl.float32)
        w = was - tl.load(now + place, mask=mask, other=0.0).to(tl.float32)
        tl.store(taken + place, w, mask=mask)
        square += w * w
        product += w * tl.load(gamma + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(norms + tl.program_id(0), tl.sqrt(tl.sum(square, 0)))
    tl.store(products + tl.program_id(0), tl.sum(product, 0))


def step_products(
    before: Tensor, now: Tensor, gamma: Tensor
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the change w = before − now, norms of its parts, and their ⟨w, γ⟩; all float32.

    A float32 `before` is overwritten with the result. Return None if the layouts differ.
    """
    if not lies_alike(before, now, gamma):
        return None
    float32 = before.dtype == torch.float32
    taken = before if float32 else torch.empty_like(before, dtype=torch.float32)
    parts = divide_up(before.numel(), _CHUNK)
    norms, products = (taken.new_empty(parts) for _ in range(2))
    run(
        step_products_kernel,
        (parts,),
        before,
        *(before, now.detach(), gamma, taken, norms, products, before.numel()),
        BLOCK=_BLOCK,
        CHUNK=_CHUNK,
    )
    return taken, norms, products
