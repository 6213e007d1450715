"""`Probe`: the fixed batch on which alignment is measured, and what it is compared with."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from adiv_monitor.alignment.layers import Role
from adiv_monitor.capture.selection import LayerChoice

DEFAULT_MAX_ROWS = 128


@dataclass(frozen=True, eq=False)
class Probe:
    """A batch on which a model is run at every reading, in evaluation mode; it is copied.

    Attributes:
        batch: the model's arguments: a tensor, a tuple of arguments, or a dict of named arguments.
            32 to 512 rows are enough; the positions of a sequence or an image count as rows.
        window: the reference point is the reading this many readings ago, and a copy of the weights
            of each is kept on the host; None: it is the model when it is attached.
        max_rows: number of sampled inputs per layer and call, chosen once; None: all.
        layers: glob patterns over paths of layers, or a predicate (path, module) → bool.
        roles: pattern over paths → role, in place of the inferred role.
        spectral: also read `spectral_…`, for which the largest singular value of W₀, dW and W of
            every layer is computed: in layers of 2,048 that takes longer than all else.
        process_group: the ranks whose probes are parts of one probe. All ranks of the group have to
            measure at the same steps. None: each rank on its own.
        seed: seed for the choice of rows.

    Raises:
        TypeError: the batch holds no tensor.
        ValueError: max_rows or window is no integer above 0.
    """

    batch: Any
    window: int | None = None
    max_rows: int | None = DEFAULT_MAX_ROWS
    layers: LayerChoice = None
    roles: Mapping[str, Role] = field(default_factory=dict)
    spectral: bool = False
    process_group: Any = None
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.batch, Mapping):  # torch's trees know dicts alone
            object.__setattr__(self, "batch", dict(self.batch))
        if isinstance(self.layers, str):
            object.__setattr__(self, "layers", (self.layers,))
        if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(self.batch)):
            raise TypeError(
                f"Probe(batch=…): got {type(self.batch).__name__}, expected what the model is "
                "called with: a tensor, a tuple of arguments or a dict of named arguments"
            )
        for name in ("max_rows", "window"):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            if value is not None and not whole:
                raise ValueError(f"Probe({name}=…): got {value!r}, expected an integer above 0")
        copied = tree_map_only(Tensor, lambda t: t.detach().clone(), self.batch)
        object.__setattr__(self, "batch", copied)

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The positional and the named arguments with which the model is called."""
        if isinstance(self.batch, Mapping):
            return (), dict(self.batch)
        return (tuple(self.batch) if isinstance(self.batch, tuple | list) else (self.batch,)), {}

    def to(self, device: torch.device) -> "Probe":
        """Return the probe with its batch on a device."""
        moved = tree_map_only(Tensor, lambda tensor: tensor.to(device), self.batch)
        return replace(self, batch=moved)

    @property
    def fingerprint(self) -> str:
        """Hash of the batch and the choice of its rows, to detect different ones."""
        found = hashlib.sha256(f"rows {self.seed} {self.max_rows}".encode())
        for leaf in tree_leaves(self.batch):
            if isinstance(leaf, Tensor):
                found.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
                data = leaf.detach().to_dense().cpu().contiguous().reshape(-1)
                found.update(data.view(torch.uint8).numpy().tobytes())
            else:
                found.update(repr(leaf).encode())
        return found.hexdigest()
