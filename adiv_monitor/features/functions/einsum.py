"""`torch.einsum` with a weight among its operands."""

from collections.abc import Sequence
from string import ascii_letters

from torch import Tensor

from adiv_monitor.features.functions.contraction import Operand, contractions
from adiv_monitor.features.uses import FunctionCall, Use, uses


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
    if not arrow:  # the letters that occur once, in alphabetical order
        once = (letter for letter in ascii_letters if left.count(letter) == 1)
        result = ("..." if "." in left else "") + "".join(once)
    full = [t.replace("...", rest[len(rest) - n :]) for t, n in zip(terms, counts, strict=True)]
    return full, result.replace("...", rest)
