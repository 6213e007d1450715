"""The functions that take a model's parameters, found by watching calls without the monitor."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves


class Uses(TorchFunctionMode):
    """A mode that records each function that computes a new tensor from a parameter or its view.

    Tensors computed from these results (a normed weight, a product with a gain) are not followed.

    Attributes:
        functions: id of a parameter → the names of these functions.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__()
        self.functions: dict[int, set[str]] = defaultdict(set)
        self._parameters = {id(p) for p in parameters}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if torch.is_grad_enabled():  # without gradients nothing is trained
            written = args[0] if func is Tensor.__setitem__ else result
            made = {_source(t) for t in _tensors(written) if t.requires_grad}
            taken = {_source(t) for t in _tensors((args, kwargs))}
            for source in taken & self._parameters if made else ():
                if source not in made:  # otherwise a view
                    self.functions[source].add(func.__name__)
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _source(tensor: Tensor) -> int:
    """Return the id of the tensor's base, or its own id."""
    with torch._C.DisableTorchFunction():
        return id(tensor if tensor._base is None else tensor._base)
