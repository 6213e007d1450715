"""What alignment is measured on: a batch that stays the same, and the point it is compared with."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from adiv_monitor.alignment.layers import Role
from adiv_monitor.alignment.passes import Arguments
from adiv_monitor.capture.selection import LayerChoice

DEFAULT_MAX_ROWS = 128


@dataclass(frozen=True, eq=False)
class Probe:
    """A batch on which a model is run at every reading, in evaluation mode; it is copied.

    Attributes:
        batch: what the model is called with: a tensor, a tuple of arguments, or a dict of named
            ones. 32 to 512 rows will do; the positions of a sequence or an image count as rows.
        reference: where W₀ and z₀ come from. None: from the model when it is attached, of which a
            copy of the measured weights is kept on the host. A function that makes the model as it
            was, with the same seed, say: called at each reading, nothing is kept.
        window: compare with so many readings ago instead; copies of the weights are kept of each.
        max_rows: inputs to look at per layer and call, chosen once; None: all of them.
        layers: glob patterns over paths of layers, or a predicate (path, module) → bool.
        roles: pattern over paths → role, in place of the inferred one.
        process_group: the ranks whose probes make up one. All of its ranks have to measure
            at the same steps. None: each on its own.
        seed: of the choice of rows.

    Raises:
        TypeError: the batch holds no tensor, or the reference can't be called.
        ValueError: max_rows or window is below 1, or a reference is given with a window.
    """

    batch: Any
    reference: Callable[[], nn.Module] | None = None
    window: int | None = None
    max_rows: int | None = DEFAULT_MAX_ROWS
    layers: LayerChoice = None
    roles: Mapping[str, Role] = field(default_factory=dict)
    process_group: Any = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(self.batch)):
            raise TypeError(
                f"Probe(batch=…): got {type(self.batch).__name__}, expected what the model is "
                "called with: a tensor, a tuple of arguments or a dict of named arguments"
            )
        if self.reference is not None and not callable(self.reference):
            raise TypeError(
                f"Probe(reference=…): got {type(self.reference).__name__}, expected a function "
                "that makes the model as it was, or None"
            )
        for name in ("max_rows", "window"):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            if value is not None and not whole:
                raise ValueError(f"Probe({name}=…): got {value!r}, expected an integer above 0")
        if self.reference is not None and self.window is not None:
            raise ValueError("Probe: got a reference and a window, expected one of them at most")
        copied = tree_map_only(Tensor, lambda t: t.detach().clone(), self.batch)
        object.__setattr__(self, "batch", copied)

    @property
    def arguments(self) -> Arguments:
        """How the model is called."""
        if isinstance(self.batch, Mapping):
            return (), dict(self.batch)
        return (tuple(self.batch) if isinstance(self.batch, tuple | list) else (self.batch,)), {}

    def to(self, device: torch.device) -> "Probe":
        """The same with its batch on a device."""
        moved = tree_map_only(Tensor, lambda tensor: tensor.to(device), self.batch)
        return replace(self, batch=moved)

    @property
    def fingerprint(self) -> str:
        """Tells batches apart."""
        found = hashlib.sha256()
        for leaf in tree_leaves(self.batch):
            if isinstance(leaf, Tensor):
                found.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
                data = leaf.detach().cpu().contiguous().reshape(-1)
                found.update(data.view(torch.uint8).numpy().tobytes())
            else:
                found.update(repr(leaf).encode())
        return found.hexdigest()
