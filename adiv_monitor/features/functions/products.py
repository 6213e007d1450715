"""Products of a weight with data: of matrices, vectors and stacks of them, on either side.

All are sums over one or more shared dimensions (`contraction.py`), but those of experts.
"""

from collections.abc import Sequence
from string import ascii_letters

import torch
from torch import Tensor

from adiv_monitor.features.features import BlockFeatures
from adiv_monitor.features.functions.contraction import Operand, contraction, contractions
from adiv_monitor.features.functions.gains import offset
from adiv_monitor.features.rows import Rows, Whole, norms
from adiv_monitor.features.uses import Found, FunctionCall, Use, uses


@uses("matmul", "__matmul__", "linalg_matmul", "mm", "bmm", "mv", "dot", "vdot")
def matmul(call: FunctionCall, input: Tensor, other: Tensor) -> list[Use]:
    """Z = A B of vectors, matrices, or stacks of matrices that are broadcast."""
    rows, columns = ("i" if input.dim() > 1 else ""), ("j" if other.dim() > 1 else "")
    terms = [f"...{rows}k" if rows else "k", f"...k{columns}" if columns else "k"]
    return einsum(call, f"{','.join(terms)}->...{rows}{columns}", input, other)


@uses("einsum")
def einsum(call: FunctionCall, equation: str, *operands: Tensor | Sequence[Tensor]) -> list[Use]:
    """Return the uses in an equation without diagonals."""
    tensors: list[Tensor] = []
    for operand in operands:
        tensors += [operand] if isinstance(operand, Tensor) else operand
    terms, result = spelled_out(equation, [tensor.dim() for tensor in tensors])
    named = [Operand(tensor, term) for tensor, term in zip(tensors, terms, strict=True)]
    return contractions(call, named, result)


def spelled_out(equation: str, dims: Sequence[int]) -> tuple[list[str], str]:
    """Return the letters of all operands and of the result, with "..." replaced by letters."""
    left, arrow, result = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    counts = [d - len(term.replace("...", "")) for term, d in zip(terms, dims, strict=True)]
    free = [letter for letter in ascii_letters if letter not in equation]
    rest = "".join(free[: max(counts)])
    if not arrow:  # the letters that occur once, in alphabetical order, capital ones first
        once = (letter for letter in sorted(ascii_letters) if left.count(letter) == 1)
        result = ("..." if "." in left else "") + "".join(once)
    full = [t.replace("...", rest[len(rest) - n :]) for t, n in zip(terms, counts, strict=True)]
    return full, result.replace("...", rest)


@uses("addmm", "addmm_", "baddbmm", "baddbmm_")
def added(
    call: FunctionCall, input: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1
) -> Found:
    """Z = x + AB of matrices, or of stacks of them; if B is a matrix, a vector x is its bias."""
    if alpha != 1 or beta != 1:
        return []
    stack = "s" * (a.dim() - 2)
    of_a, of_b, result = Operand(a, f"{stack}ik"), Operand(b, f"{stack}kj"), f"{stack}ij"
    is_affine = call.of_model(input) and call.of_model(b) and not call.of_model(a)
    if is_affine and b.dim() == 2 and input.shape == b.shape[1:]:
        return [contraction(of_b, of_a, result, bias=input)]
    found = contractions(call, [of_a, of_b], result)
    if call.is_weight(input) and call.has_data(a, b):
        return [*found, offset(input, call.result.shape)]
    return found


# --- experts in one weight tensor, with rows sorted by expert ------------------------------------


@uses("_grouped_mm", "grouped_mm_fallback", "grouped_mm")
def grouped_product(
    call: FunctionCall,
    input: Tensor,
    mat2: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> list[Use] | Use | None:
    """z_r = x_r W_e, (experts, inputs, outputs), for the rows from offs[e − 1] up to offs[e].

    The offsets of the experts stay on the device. The function does not write the rows after the
    last expert's; they count as zero-gradient rows.
    """
    if offs is None:
        return matmul(call, input, mat2)
    if call.of_model(input) or not call.of_model(mat2) or (input.dim(), mat2.dim()) != (2, 3):
        return None
    count = len(mat2)
    every = torch.searchsorted(offs, torch.arange(len(input), device=offs.device), right=True)
    nobody = (every == count)[:, None]

    def layout(tensor: Tensor) -> Tensor:
        return tensor.masked_fill(nobody, 0)

    def features(rows: Rows) -> BlockFeatures:
        block = every if rows.chosen is None else every[rows.flat]
        phi = rows.take(input).masked_fill_((block == count)[:, None], 0)
        return BlockFeatures(phi, block, count)

    def whole(rows: Rows) -> Whole:
        loads = offs.diff(prepend=offs.new_zeros(1))
        return Whole(norms(input.masked_fill(nobody, 0)), loads=loads)

    return Use("experts", mat2, None, features, layout, whole, shaped=torch.adjoint)
