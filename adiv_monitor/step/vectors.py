"""The vectors of the sampled rows of all layers, stacked, and the dot products of each row's.

Layers are stacked twice, so that few operations serve all of them: in a *family* by what their
products need, in a *block* of families by the shape of their vectors alone.
"""

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from adiv_monitor.capture.selection import Layer
from adiv_monitor.capture.weights.pieces import Parts
from adiv_monitor.features.features import Features
from adiv_monitor.features.rows import compute_dtype, dots
from adiv_monitor.maths.sums import VECTORS, names_of, pairs_of
from adiv_monitor.step.transfer import Outgoing

Change = tuple[Tensor | None, Tensor | None]  # of the weight and of the bias; None: not trained
Fail = Callable[[str, Exception], None]
P = TypeVar("P")

# The most entries that are stacked, on a CPU and on others: for more, new memory costs more.
STACKED, _TOGETHER = 2**18, 2**24


@dataclass(slots=True, eq=False)
class LayerInProgress:
    """A layer between its final gradient and the end of the step. Vectors are (rows, n_total).

    Attributes:
        layer: the layer.
        features: Φ of the rows of all calls; None once they are stacked.
        G: ∂L/∂z, as the backward pass left it.
        z: the outputs.
        gamma: γ of weight and bias.
        e: the move of a plain gradient step, where it is known already.
    """

    layer: Layer
    features: Features | None
    G: Tensor
    z: Tensor
    gamma: Change
    e: Tensor | None = None


class Family:
    """Layers whose features and parameters have the same shapes: one product serves all.

    A layer whose features can't be stacked is alone in its family.

    Args:
        layers: the layers.

    Raises:
        ValueError: the features' scales are of another shape than theirs.
    """

    def __init__(self, layers: Sequence[LayerInProgress]) -> None:
        self.layers = layers
        first, *others = [x.features for x in layers if x.features is not None]
        self._is_stacked = first.form is not None
        self._features = first.stacked(others) if self._is_stacked else first
        dtype, shape = compute_dtype(layers[0].G), (len(layers[0].G), self._features.groups)
        scale = self._features.scale()
        if scale is not None and (scale.shape[-2:] != shape or not scale.is_floating_point()):
            raise ValueError(
                f"the features' scale() gave {scale.dtype} of shape {tuple(scale.shape)}, expected "
                f"real numbers of shape (rows, groups) = {shape}: ‖φ‖² of every row"
            )
        self._scale = None if scale is None else scale.to(dtype).reshape(len(layers), *shape)
        self._groups = 0 if scale is None else shape[1]
        if others:
            for x in layers:
                x.features = None

    def move(self, changes: Sequence[Change], of: Mapping[str, Tensor], vector: str) -> None:
        """Write Φ_W ΔWᵀ + φ_b ⊗ Δb of every layer to a vector; with that of d, its last term."""
        weight, bias = map(self._together, zip(*changes, strict=True))
        out, of_bias = of[vector], of.get("bias") if vector == "d" else None
        self._features.move(weight, bias, out if self._is_stacked else out[0])
        if of_bias is not None:
            own = None if bias is None else self._features.by_bias(bias)
            of_bias.zero_() if own is None else of_bias.copy_(own)

    def _together(self, tensors: Sequence[Tensor | None]) -> Tensor | None:
        if tensors[0] is None or not self._is_stacked:
            return tensors[0]
        return stacked([tensor for tensor in tensors if tensor is not None])

    def vectors(self, *, updates: bool) -> tuple[str, ...]:
        """Return the vectors that its rows have, in order."""
        first, groups = self.layers[0].layer, self._groups
        has_both = first.weight is not None and first.bias is not None
        return (
            *(["own"] if groups > 1 else []),
            *("e", "G"),
            *(["d", "bias"] if updates and has_both else ["d"] if updates else []),
            *(["z", "rest"] if groups else ["z"]),
        )

    def split(self, of: Mapping[str, Tensor]) -> None:
        """Compute the parts of e by the row's own scale and by the other rows."""
        scale, e, G = self._scale, of["e"], of["G"]
        if scale is None:
            return
        if scale.shape[2] == 1:
            torch.addcmul(e, scale, G, value=-1, out=of["rest"])
            return
        own, shape = of["own"], (*scale.shape, G.shape[2] // scale.shape[2])
        torch.mul(scale[..., None], G.view(shape), out=own.view(shape))
        torch.sub(e, own, out=of["rest"])

    def send(
        self,
        out: Outgoing,
        paths: Sequence[str],
        products: Mapping[str, Float[Tensor, "layers rows"]],
        active: Float[Tensor, "layers rows"],
    ) -> None:
        """Send the numbers of the rows, of which the products are known already."""
        of_rows = active if self._is_stacked else active[0]
        found, rows = self._features.common(of_rows), dict(products)
        if found:
            rows["common"], rows["square"] = found
        if self._scale is not None:
            rows |= _of_scales(self._scale)
        out.add("rows", paths, rows)
        out.add("layers", paths, {}, groups=self._groups, has_common=bool(found))


class Block:
    """Families whose vectors have the same shape.

    Args:
        families: the families.
        updates: whether an optimizer step follows.
    """

    def __init__(self, families: Sequence[Family], *, updates: bool) -> None:
        self.layers = layers = [x for family in families for x in family.layers]
        vectors = [family.vectors(updates=updates) for family in families]
        self._named = tuple(sorted(set().union(*vectors), key=VECTORS.index))
        G = layers[0].G
        shape = (len(self._named), len(layers), *G.shape)
        self._vectors = G.new_empty(shape, dtype=compute_dtype(G))
        self._of = dict(zip(self._named, self._vectors.unbind(), strict=True))
        # Not by `out=`, which on a GPU casts one by one.
        self._of["G"].copy_(torch.stack([x.G for x in layers]))
        self._of["z"].copy_(torch.stack([x.z for x in layers]))
        for x in layers:
            del x.G, x.z  # the stacks have them now
        # Every family with its vectors, and its place.
        self._parts: list[tuple[Family, dict[str, Tensor], slice]] = []
        end = 0
        for family, named in zip(families, vectors, strict=True):
            at = slice(end, end := end + len(family.layers))
            self._parts.append((family, {vector: self._of[vector][at] for vector in named}, at))

    def plain_step(self, fail: Fail) -> None:
        """Compute e = Φγᵀ, and its part by the other rows; `fail` as in `blocks_of`."""
        for family, of, _ in self._parts:
            with losing(family.layers, fail):
                e, made = of["e"], family.layers[0].e
                if made is not None:
                    e.copy_(made)
                else:
                    family.move([x.gamma for x in family.layers], of, "e")
                family.split(of)

    def update(self, taken: Parts, kept: Container[str], fail: Fail) -> None:
        """Compute d from what was subtracted of the parameters, of layers that were not lost."""
        for family, of, _ in self._parts:
            if any(x.layer.path in kept for x in family.layers):
                with losing(family.layers, fail):
                    family.move([x.layer.change(taken) for x in family.layers], of, "d")

    def send(self, out: Outgoing) -> None:
        """Send the numbers of the rows to the host."""
        named, V = self._named, self._vectors
        chain = named.index("z")  # neighbours among those before
        products = [*dots(V, V), *dots(V[: chain - 1], V[1:chain])]
        if "own" in self._of:
            products.append(dots(self._of["own"], self._of["G"]))
        by_name = dict(zip(names_of(pairs_of(named)), products, strict=True))
        active = by_name["G_G"].sign()
        paths = [x.layer.path for x in self.layers]
        is_zero = self._of["G"] == 0
        out.add("layers", paths, {"silent": is_zero.all(1).sum(1)}, width=V.shape[-1])
        z, squares = self._of["z"], self._of["z"].square()
        entries = {
            "largest": torch.linalg.vector_norm(z, torch.inf, dim=2),
            "fourth": dots(squares, squares),
            "zeros": is_zero.sum(2),
        }
        for family, of, at in self._parts:
            own = {name: by_name[name][at] for name in names_of(pairs_of(tuple(of)))}
            own |= {name: values[at] for name, values in entries.items()}
            family.send(out, paths[at], own, active[at])


def blocks_of(layers: Iterable[LayerInProgress], fail: Fail, *, updates: bool) -> list[Block]:
    """Return all layers in blocks, without those that fail.

    Args:
        layers: the layers.
        fail: called with path and exception of layers that fail.
        updates: whether an optimizer step follows.
    """
    alike: dict[object, list[LayerInProgress]] = defaultdict(list)
    for x in layers:
        assert x.features is not None
        form = x.features.form if x.e is None else None  # all-gathered parameters come one by one
        shapes = [g is None or (g.shape, g.dtype, g.stride()) for g in x.gamma]
        alike[(x if form is None else form, *shapes, x.G.shape)].append(x)
    blocks: dict[object, list[Family]] = defaultdict(list)
    for several in alike.values():
        first = several[0]
        assert first.features is not None
        size = max(first.features.size, first.G.numel()) if several[1:] else 0
        for part in _in_parts(several, size, first.G.device):
            with losing(part, fail):
                G = part[0].G
                blocks[G.shape, compute_dtype(G), G.device].append(Family(part))
    found = list[Block]()
    for families in blocks.values():
        G = families[0].layers[0].G
        size = G.numel() * max(len(family.layers) for family in families)
        for some in _in_parts(families, size, G.device):
            with losing([x for family in some for x in family.layers], fail):
                found.append(Block(some, updates=updates))
    return found


def _in_parts(several: list[P], size: int, device: torch.device) -> list[list[P]]:
    """Split what is to be stacked, each of this many entries, so that no stack has too many."""
    most = max(1, (STACKED if device.type == "cpu" else _TOGETHER) // max(1, size))
    return [several[i : i + most] for i in range(0, len(several), most)]


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors of the same shape as one, without a copy if they are at equal distances."""
    first = tensors[0]
    if len(tensors) == 1:
        return first[None]
    places = [tensor.data_ptr() for tensor in tensors]
    gap = places[1] - places[0]
    even = gap > 0 and places == [*range(places[0], places[-1] + 1, gap)]
    memory = first.untyped_storage()
    if even and places[-1] < memory.data_ptr() + memory.nbytes():
        step = gap // first.element_size()
        return first.as_strided((len(tensors), *first.shape), (step, *first.stride()))
    return torch.stack(list(tensors))


def _of_scales(scale: Float[Tensor, "layers rows groups"]) -> dict[str, Tensor]:
    """Return the sums over each row's scales."""
    if scale.shape[2] == 1:
        return {"scale": scale[..., 0]}
    deviation, mean = torch.std_mean(scale, 2, correction=0)
    return {"scale": scale.amax(2), "mean": mean, "off": deviation * scale.shape[2] ** 0.5}


@contextmanager
def losing(layers: Iterable[LayerInProgress], fail: Fail) -> Iterator[None]:
    """Report layers as lost whose computation within the block fails."""
    try:
        yield
    except Exception as error:
        for x in layers:
            fail(x.layer.path, error)
