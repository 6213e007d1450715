"""Products of matrices, vectors and stacks of them, with the weight on either side.

All are treated as sums over one or more shared dimensions (`contraction.py`).
"""

from collections.abc import Sequence
from string import ascii_lowercase, ascii_uppercase

from torch import Tensor

from adiv_monitor.features.functions.broadcast import offset
from adiv_monitor.features.functions.contraction import Operand, contraction, contractions
from adiv_monitor.features.uses import FunctionCall, Use, uses


@uses("matmul", "__matmul__", "linalg_matmul")
def matmul(call: FunctionCall, input: Tensor, other: Tensor) -> list[Use]:
    """Z = A B of vectors, matrices, or stacks of matrices that are broadcast."""
    stack = ascii_uppercase[: max(input.dim(), other.dim(), 2) - 2]
    left = _last(stack, input.dim() - 2) + ("ik" if input.dim() > 1 else "k")
    right = _last(stack, other.dim() - 2) + ("kj" if other.dim() > 1 else "k")
    result = stack + ("i" if input.dim() > 1 else "") + ("j" if other.dim() > 1 else "")
    return contractions(call, [Operand(input, left), Operand(other, right)], result)


@uses("mm", "bmm")
def matrices(call: FunctionCall, input: Tensor, mat2: Tensor) -> list[Use]:
    """Z = A B."""
    return matmul(call, input, mat2)


@uses("mv")
def matrix_vector(call: FunctionCall, input: Tensor, vec: Tensor) -> list[Use]:
    """Z = A v."""
    return matmul(call, input, vec)


@uses("dot", "vdot")
def dot(call: FunctionCall, input: Tensor, tensor: Tensor) -> list[Use]:
    """Z = a·b."""
    return matmul(call, input, tensor)


@uses("inner")
def inner(call: FunctionCall, input: Tensor, other: Tensor) -> list[Use] | None:
    """Z = Σ_k a_…k b_…k."""
    if not input.dim() or not other.dim():
        return None
    left, right = ascii_uppercase[: input.dim() - 1], ascii_lowercase[: other.dim() - 1]
    operands = [Operand(input, f"{left}z"), Operand(other, f"{right}z")]
    return contractions(call, operands, left + right)


@uses("outer", "ger")
def outer(call: FunctionCall, input: Tensor, vec2: Tensor) -> list[Use]:
    """Z = a bᵀ."""
    return contractions(call, [Operand(input, "i"), Operand(vec2, "j")], "ij")


@uses("tensordot")
def tensordot(
    call: FunctionCall,
    a: Tensor,
    b: Tensor,
    dims: int | Sequence[Sequence[int]] = 2,
) -> list[Use]:
    """Z = Σ a b over some dimensions of each."""
    left, right = list(ascii_uppercase[: a.dim()]), list(ascii_lowercase[: b.dim()])
    pairs = (range(-dims, 0), range(dims)) if isinstance(dims, int) else dims
    for of_a, of_b in zip(*pairs, strict=True):
        right[of_b] = left[of_a]
    operands = [Operand(a, "".join(left)), Operand(b, "".join(right))]
    result = [c for c in left if c not in right] + [c for c in right if c not in left]
    return contractions(call, operands, "".join(result))


@uses("bilinear")
def bilinear(
    call: FunctionCall,
    input1: Tensor,
    input2: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
) -> Use | None:
    """Z_n = x₁ᵀ W_n x₂ + b_n: φ = [x₁ ⊗ x₂, 1]."""
    rows = ascii_uppercase[: input1.dim() - 1]
    data = [Operand(input1, f"{rows}i"), Operand(input2, f"{rows}j")]
    return contraction(Operand(weight, "nij"), data, f"{rows}n", bias=bias)


# --- z = βb + αAB --------------------------------------------------------------------------------


@uses("addmm", "addmm_")
def added_matrices(
    call: FunctionCall,
    input: Tensor,
    mat1: Tensor,
    mat2: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Sequence[Use]:
    """Z = βb + αAB; if B is the weight, a vector b is its bias."""
    of_columns = call.of_model(mat2) and not call.of_model(mat1)
    if of_columns and call.of_model(input) and input.shape == mat2.shape[1:]:
        weight, data = Operand(mat2, "kj"), [Operand(mat1, "ik")]
        found = contraction(weight, data, "ij", factor=alpha, bias=input, bias_factor=beta)
        return [] if found is None else [found]
    return _added(call, input, [Operand(mat1, "ik"), Operand(mat2, "kj")], "ij", beta, alpha)


@uses("addmv", "addmv_")
def added_matrix_vector(
    call: FunctionCall,
    input: Tensor,
    mat: Tensor,
    vec: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> list[Use]:
    """Z = βb + αAv."""
    return _added(call, input, [Operand(mat, "ik"), Operand(vec, "k")], "i", beta, alpha)


@uses("addr", "addr_")
def added_outer(
    call: FunctionCall,
    input: Tensor,
    vec1: Tensor,
    vec2: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> list[Use]:
    """Z = βb + α a₁a₂ᵀ."""
    return _added(call, input, [Operand(vec1, "i"), Operand(vec2, "j")], "ij", beta, alpha)


@uses("baddbmm", "baddbmm_")
def added_stacks(
    call: FunctionCall,
    input: Tensor,
    batch1: Tensor,
    batch2: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> list[Use]:
    """Z = βb + αAB, matrix by matrix."""
    operands = [Operand(batch1, "bik"), Operand(batch2, "bkj")]
    return _added(call, input, operands, "bij", beta, alpha)


@uses("addbmm", "addbmm_")
def added_sum(
    call: FunctionCall,
    input: Tensor,
    batch1: Tensor,
    batch2: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> list[Use]:
    """Z = βb + αΣAB over all matrices."""
    operands = [Operand(batch1, "bik"), Operand(batch2, "bkj")]
    return _added(call, input, operands, "ij", beta, alpha)


def _added(
    call: FunctionCall,
    added: Tensor,
    operands: Sequence[Operand],
    result: str,
    beta: float,
    alpha: float,
) -> list[Use]:
    """Return the uses in the product, and the use of the added parameter as an offset."""
    found = contractions(call, operands, result, alpha)
    if call.of_model(added) and added.requires_grad and _has_data(call, added, operands):
        of_offset = offset(added, call.result.shape, beta)
        found += [] if of_offset is None else [of_offset]
    return found


def _has_data(call: FunctionCall, added: Tensor, operands: Sequence[Operand]) -> bool:
    return not all(call.of_model(tensor) for tensor in (added, *(o.tensor for o in operands)))


def _last(letters: str, count: int) -> str:
    return letters[len(letters) - max(count, 0) :]
