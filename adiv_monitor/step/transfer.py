"""Transfer of all numbers of a step from device to host at once."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import numpy as np
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from adiv_monitor.features.rows import Index
from adiv_monitor.maths.sums import TABLES, About, Array, StepSums, Table, blank, in_order

# The arguments of `Outgoing.add`, `known` last.
_Known = Mapping[str, Index | float | str]
_Columns = tuple[str, Sequence[str], Mapping[str, Tensor], _Known]
Flags = dict[str, list[Tensor]]  # numbers of the step as a whole, by name; see `Outgoing`
HostFlags = Mapping[str, Sequence[Array]]  # the same on the host


class Outgoing:
    """The numbers of a step on their way to the host.

    Attributes:
        about: static properties by path of the layers; one that is lost is taken out.
        tensors: all tensors of layers.
        flags: numbers of the step as a whole, by name.

            - wrote: nonzero if the optimizer changed `.grad` during its step; the same of the
              weights after it.
            - skipped: > 0 if a fused optimizer found inf and did nothing.
            - `OF_PARAMETERS`: dot products and counts of pieces, by `ParameterSteps`.
            - loss_change: realised change of the loss.
            - began, stepped: some weights as the optimizer's step began, and as it ended.
            - untrained: norms of some entries of each parameter that the optimizer does not step.
            - loss_gradients, zeroed: `losses` of `Passes`, and the norms of its `zeroed`.
            - batch, next_batch, outputs, norm_passes: those of `Capture` and `Passes`.
    """

    def __init__(self) -> None:
        self.flags: Flags = {}
        self.tensors: list[Tensor] = []
        self.about: dict[str, About] = {}
        self._columns: list[_Columns] = []

    def add(
        self,
        table: str,
        paths: Sequence[str],
        tensors: Mapping[str, Tensor],
        **known: Index | float | str,
    ) -> None:
        """Add numbers of layers.

        Args:
            table: the table that has them.
            paths: the layers.
            tensors: by column, for each layer equally many lines.
            known: by column, numbers on the host: one, or one for each line of a layer.
        """
        self._columns.append((table, paths, tensors, known))
        self.tensors += tensors.values()

    def sums(self, arrays: Iterator[Array]) -> StepSums:
        """Return the numbers of the layers whose rows are there, in the order of the model.

        Args:
            arrays: `tensors` on the host.
        """
        arrived = {path for name, of, *_ in self._columns if name == "rows" for path in of}
        number = {path: i for i, path in enumerate(filter(arrived.__contains__, self.about))}
        layers = blank("layers", len(number))
        parts: dict[str, list[Table]] = {name: [blank(name, 0)] for name in TABLES}
        for table, paths, tensors, known in self._columns:
            kept = [i for i, path in enumerate(paths) if path in number]
            at = np.array([number[paths[i]] for i in kept], dtype=np.int64)
            columns = {name: next(arrays).reshape(len(paths), -1)[kept] for name in tensors}
            if table == "layers":
                for name, value in {**columns, **known}.items():
                    layers[name][at] = value[:, 0] if isinstance(value, np.ndarray) else value
                continue
            width = next(iter(columns.values())).shape[1]
            lines = blank(table, (len(at), width))
            lines["layer"] = at[:, None]
            for name, value in {**columns, **known}.items():
                lines[name] = value
            parts[table].append(lines.ravel())
        several = {name: in_order(np.concatenate(of)) for name, of in parts.items()}
        about = tuple(self.about[path] for path in number)
        return StepSums(tuple(number), about, layers, **several)


def fetch(
    out: Outgoing, attention: Mapping[str, Tensor]
) -> tuple[StepSums, dict[str, list[Array]], dict[str, Array]]:
    """Copy the numbers of a step to the host: those of layers, flags, and records of attention."""
    of_flags = [tensor for of in out.flags.values() for tensor in of]
    arrays = iter(fetch_tensors([*out.tensors, *of_flags, *attention.values()]))
    sums = out.sums(arrays)
    flags = {name: [next(arrays) for _ in of] for name, of in out.flags.items()}
    return sums, flags, dict(zip(attention, arrays, strict=True))


def fetch_numbers(values: Sequence[float | Tensor]) -> list[float]:
    """Return all numbers, concatenated, by one transfer from each device."""
    arrays = iter(fetch_tensors([value for value in values if isinstance(value, Tensor)]))
    several = (next(arrays).ravel().tolist() if isinstance(x, Tensor) else [x] for x in values)
    return [*chain.from_iterable(several)]


def fetch_tensors(tensors: Sequence[Tensor]) -> list[Array]:
    """Return float64 arrays of the tensors' shapes, by one transfer from each device."""
    found: dict[int, Array] = {}
    devices = [tensor.device for tensor in tensors]
    for device in set(devices):
        own = {i: tensors[i] for i, of in enumerate(devices) if of == device}
        flat: Tensor = _flatten_dense_tensors([*own.values()])  # type: ignore[no-untyped-call]
        numbers: Array = flat.cpu().double().numpy()
        ends = np.cumsum([tensor.numel() for tensor in own.values()])
        for (i, tensor), part in zip(own.items(), np.split(numbers, ends[:-1]), strict=True):
            found[i] = part.reshape(tensor.shape)
    return [found[i] for i in range(len(tensors))]
