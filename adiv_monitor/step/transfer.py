"""From the device to the host: everything of a step at once."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from adiv_monitor.maths.readings import Array

Outer = TypeVar("Outer", str, int)
Inner = TypeVar("Inner", str, int)


class Transfer:
    """Collects tensors, then brings them over by one transfer per device."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._arrays: list[Array] = []

    def add(self, named: Mapping[Outer, Mapping[Inner, Tensor]]) -> dict[Outer, dict[Inner, int]]:
        """Take these along; gives the places under which `get` finds them."""
        places: dict[Outer, dict[Inner, int]] = {}
        for key, tensors in named.items():
            first = len(self._tensors)
            self._tensors += tensors.values()
            places[key] = {name: first + i for i, name in enumerate(tensors)}
        return places

    def run(self) -> None:
        """Bring everything over, as float64 arrays of the same shapes."""
        self._arrays = [np.empty(0)] * len(self._tensors)
        by_device: dict[torch.device, list[int]] = defaultdict(list)
        for i, tensor in enumerate(self._tensors):
            by_device[tensor.device].append(i)
        for places in by_device.values():
            tensors = [self._tensors[i] for i in places]
            numbers = _packed(tensors)
            end = 0
            for i, tensor in zip(places, tensors, strict=True):
                start, end = end, end + tensor.numel()
                self._arrays[i] = numbers[start:end].reshape(tensor.shape)
        self._tensors.clear()

    def get(self, places: Mapping[Outer, Mapping[Inner, int]]) -> dict[Outer, dict[Inner, Array]]:
        """What stood at these places."""
        return {
            key: {name: self._arrays[place] for name, place in named.items()}
            for key, named in places.items()
        }


def _packed(tensors: list[Tensor]) -> Array:
    """All of them end to end, on the host."""
    try:
        flat: Tensor = _flatten_dense_tensors(tensors)  # type: ignore[no-untyped-call]
        return flat.cpu().numpy().astype(np.float64)
    except torch.OutOfMemoryError:  # on the device; one by one there is nothing to make room for
        return np.concatenate([part.cpu().double().numpy().reshape(-1) for part in tensors])


def fetch_numbers(values: Sequence[float | Tensor]) -> list[float]:
    """The numbers of all these, end to end, by one transfer from each device."""
    transfer = Transfer()
    tensors = {i: value for i, value in enumerate(values) if isinstance(value, Tensor)}
    places = transfer.add({"": tensors})
    transfer.run()
    arrays = transfer.get(places)[""]
    found: list[float] = []
    for i, value in enumerate(values):
        found += [value] if not isinstance(value, Tensor) else arrays[i].reshape(-1).tolist()
    return found


def fetch(
    layers: Mapping[str, Mapping[str, Tensor]],
    flags: Mapping[str, Tensor],
    products: Mapping[str, Mapping[int, Tensor]],
    norms: Mapping[str, Mapping[int, Tensor]],
    attention: Mapping[str, Mapping[str, Tensor]],
) -> tuple[
    dict[str, dict[str, Array]],
    dict[str, Array],
    dict[str, dict[int, Array]],
    dict[str, dict[str, Array]],
]:
    """Numbers of every layer, of the step as a whole, of the parameters, and of attentions.

    Args:
        layers: by path and name.
        flags: by name.
        products: by name and id of a parameter, numbers that add up to a dot product.
        norms: the same as norms, whose squares add up to it; the squares are taken here.
        attention: by path and name.
    """
    transfer = Transfer()
    of_layers = transfer.add(layers)
    of_step = transfer.add({"": flags})
    of_parameters, of_norms = transfer.add(products), transfer.add(norms)
    of_attention = transfer.add(attention)
    transfer.run()
    found = transfer.get(of_parameters)
    for name, parts in transfer.get(of_norms).items():
        found.setdefault(name, {}).update({key: part**2 for key, part in parts.items()})
    layers_found, step_found = transfer.get(of_layers), transfer.get(of_step)[""]
    return layers_found, step_found, found, transfer.get(of_attention)
