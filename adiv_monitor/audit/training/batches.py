"""Batches of any structure: their order, their copies on a device, their sizes and samples."""

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

DEFAULT_SIZE = 16  # samples in a batch of a data set


def loader_of(samples: Dataset[Any], size: int, seed: int) -> DataLoader[Any]:
    """Return a loader of full, shuffled batches; of one that is not full if there is no other."""
    full = len(samples) >= size  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(samples, size, shuffle=True, drop_last=full, generator=generator)


def is_data_set(batches: object) -> TypeGuard[Dataset[Any]]:
    """Return whether this is a data set of samples, by number, in place of batches."""
    return isinstance(batches, Dataset) and not isinstance(batches, IterableDataset)


@contextmanager
def as_drawn(batches: object) -> Iterator[None]:
    """Restore the generators of a loader after the block, in which they draw the run's order."""
    by_batch = getattr(batches, "batch_sampler", None)
    samplers = getattr(batches, "sampler", None), by_batch, getattr(by_batch, "sampler", None)
    drawing = [getattr(holder, "generator", None) for holder in (batches, *samplers)]
    before = [(g, g.get_state()) for g in drawing if isinstance(g, torch.Generator)]
    try:
        yield
    finally:
        for generator, state in before:
            generator.set_state(state)


def in_words(batches: object) -> str:
    """Return the class of a loader with that of its data set, or of another iterable."""
    kind = type(batches).__name__
    data_set = getattr(batches, "dataset", None)
    return kind if data_set is None else f"{kind} of {type(data_set).__name__}"


def taken(batches: Iterable[Any], steps: int, device: torch.device) -> tuple[Any, ...]:
    """Return copies, on the device, of the first batches, at most one for each step.

    A batch that occurs again with unchanged tensors gets the same copy.

    Raises:
        TypeError: `batches` can't be iterated over.
        ValueError: There is no batch, or one without samples.
    """
    if not isinstance(batches, Iterable) or isinstance(batches, (str, bytes)):
        told = "expected an iterable of batches, such as a DataLoader"
        raise TypeError(f"audit(batches=…): got {type(batches).__name__}, {told}")
    found: list[Any] = []
    given: dict[Any, tuple[Any, Any]] = {}  # a tensor that is held keeps its id
    for number, batch in enumerate(itertools.islice(batches, steps)):
        inside = list(tensors(batch))
        if any(x.ndim and not x.numel() for x in inside):
            told = f"got an empty tensor in batch {number}, expected at least one sample in each"
            raise ValueError(f"audit(batches=…): {told}")
        key = tuple((id(x), x._version) for x in inside) or number
        if key not in given:
            given[key] = batch, on_device(copied(batch), device)
        found.append(given[key][1])
    if not found:
        raise ValueError("audit(batches=…): got no batch, expected at least one")
    return tuple(found)


def copied(batch: Any) -> Any:
    """Return a copy of the batch that a model may write into."""
    return copy.deepcopy(batch)


def on_device(batch: Any, device: torch.device) -> Any:
    """Return the batch with its tensors, and all else that has a `to(device)`, on a device."""
    return mapped(batch, lambda x: x.to(device), lambda x: callable(getattr(x, "to", None)))


def mapped(
    batch: Any, change: Callable[[Any], Any], is_leaf: Callable[[Any], bool] = torch.is_tensor
) -> Any:
    """Return the same structure with its tensors changed; objects of unknown types stay."""
    if is_leaf(batch):
        return change(batch)
    if isinstance(batch, (list, tuple)):
        parts = [mapped(x, change, is_leaf) for x in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    if isinstance(batch, Mapping):
        changed: Any = copy.copy(batch)
        for key, value in batch.items():
            changed[key] = mapped(value, change, is_leaf)
        return changed
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        own = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch) if f.init}
        return dataclasses.replace(batch, **mapped(own, change, is_leaf))
    return batch


def tensors(batch: Any) -> Iterator[Tensor]:
    """Yield all tensors of a batch."""
    found: list[Tensor] = []

    def note(x: Tensor) -> Tensor:
        found.append(x)
        return x

    mapped(batch, note)
    yield from found


def size_of(batch: Any) -> int:
    """Return the number of samples: the length of the first tensor that has one, or else 0."""
    return next((len(x) for x in tensors(batch) if x.ndim), 0)


def first(batch: Any, samples: int) -> Any:
    """Return the first samples of a batch; the batch itself if it has no more samples than that.

    Every dense tensor of the batch's length is cut; all samples share the other tensors.
    """
    size = size_of(batch)
    if size <= samples:
        return batch
    return mapped(batch, lambda x: x[:samples] if x.shape[:1] == (size,) and not x.is_sparse else x)


def called(model: nn.Module, batch: Any) -> Any:
    """Call the model on a batch: `model(**batch)`, `model(*batch)` or `model(batch)`."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (list, tuple)):
        return model(*batch)
    return model(batch)
