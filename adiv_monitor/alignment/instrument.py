"""`Alignment`: measures a model's alignments on a probe, relative to a reference point."""

from collections import deque
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from adiv_monitor.alignment.layers import AlignedLayer, is_matrix, with_roles
from adiv_monitor.alignment.passes import Seen, look
from adiv_monitor.alignment.probe import Probe
from adiv_monitor.alignment.sums import reading_of, sums_of
from adiv_monitor.capture.selection import listed
from adiv_monitor.errors import AdivError
from adiv_monitor.report import AlignmentReading

# A reference point: by path of a layer, under "rows" z₀, under "weights" a copy of W₀.
Point: TypeAlias = dict[str, dict[str, Tensor]]


class Alignment:
    """Instrument that reads alpha, omega, u and A(W, z) of a model's layers.

    Every reading takes one forward pass of the probe and four products per layer. It changes
    nothing in the model or the run.

    Args:
        model: the model; lazy layers must have run.
        probe: the batch on which the model is run, and the choice of the reference point.

    Raises:
        AdivError: the forward pass uses no layer that is chosen and can be measured.
        TypeError: `probe` is no `Probe`, or the model can't be called with its batch.
        ValueError: one of the patterns of `Probe(roles=…)` fits no layer.

    Attributes:
        layers: the measured layers, in the order in which they run.
        refused: by name of a weight that the probe's forward pass uses, why it is not measured.

    Example:
        >>> import torch
        >>> from adiv_monitor.alignment import Alignment, Probe
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 4))
        >>> alignment = Alignment(model, Probe(torch.randn(64, 32)))
        >>> _ = torch.nn.init.ones_(model[0].weight)
        >>> round(alignment.read()["0"].alpha, 1)
        0.5
    """

    def __init__(self, model: nn.Module, probe: Probe) -> None:
        if not isinstance(probe, Probe):
            raise TypeError(
                f"Alignment(probe=…): got {type(probe).__name__}, expected a Probe: Probe(batch)"
            )
        self._model = model
        self._probe = probe
        uses = look(model, probe)
        self.refused = uses.refused
        self._shapes = {path: layer.shapes for path, layer in uses.seen.items()}
        self.layers: tuple[AlignedLayer, ...] = with_roles([*uses.aligned()], probe.roles)
        # The first is the reference point.
        self._points: deque[Point] = deque([_point(uses.seen)], maxlen=probe.window or 1)

    @property
    def unmeasured(self) -> list[str]:
        """Names of trained parameters with two dimensions other than 1 that no layer here uses."""
        used = {id(p) for layer in self.layers for p in layer.parameters}
        return [
            name
            for name, p in self._model.named_parameters()
            if p.requires_grad and is_matrix(p) and id(p) not in used
        ]

    @torch.inference_mode(False)
    def read(self) -> dict[str, AlignmentReading]:
        """Return the present readings by layer.

        Raises:
            AdivError: the model's calls of its layers differ from those at the reference point.
        """
        seen = look(self._model, self._probe).seen
        shapes = {path: layer.shapes for path, layer in seen.items()}
        either = {**shapes, **self._shapes}
        if paths := [p for p in either if shapes.get(p) != self._shapes.get(p)]:
            raise AdivError(
                f"Alignment: '{paths[0]}' was called with rows {shapes.get(paths[0])}, expected "
                f"{self._shapes.get(paths[0])} as at the reference point: z − z₀ has to be of the "
                "same samples"
            )
        point, of_layers = self._points[0], []
        for path, layer in seen.items():
            z0, told = point["rows"][path].to(layer.rows.device), point["weights"][path]
            pair = layer.matrices(told), layer.matrices(layer.weight())
            of_layers.append(sums_of(layer, z0, *pair, spectral=self._probe.spectral))
        sums = torch.stack(of_layers)
        if self._probe.process_group is not None:
            dist.all_reduce(sums, group=self._probe.process_group)
        if self._probe.window is not None:
            self._points.append(_point(seen))
        return {
            layer.path: reading_of(layer, of_layer)
            for layer, of_layer in zip(self.layers, sums.tolist(), strict=True)
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the reference point, for a resumed run."""
        return {"probe": self._probe.fingerprint, "snapshots": [*self._points]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Use the saved reference point from now on.

        Raises:
            ValueError: the reference point belongs to another probe or to other layers.
        """
        if state["probe"] != self._probe.fingerprint:
            raise ValueError(
                "Alignment.load_state_dict: the saved reference point is that of another probe, "
                "expected the same batch, seed and max_rows: z − z₀ of different samples is no "
                "change"
            )
        if any(point["rows"].keys() != self._shapes.keys() for point in state["snapshots"]):
            raise ValueError(
                "Alignment.load_state_dict: the saved reference point has other layers, expected "
                f"those that the probe chooses: {listed([*self._shapes])}"
            )
        self._points = deque(state["snapshots"], self._points.maxlen)


def _point(seen: Mapping[str, Seen]) -> Point:
    return {
        "rows": {path: layer.rows for path, layer in seen.items()},
        "weights": {path: x.weight().to("cpu", copy=True) for path, x in seen.items()},
    }
