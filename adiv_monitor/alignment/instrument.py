"""`Alignment`: measures a model's alignments on a probe, relative to a reference point."""

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from adiv_monitor.alignment.layers import AlignedLayer, is_matrix, with_roles
from adiv_monitor.alignment.probe import Probe
from adiv_monitor.alignment.snapshot import Seen, Snapshot, look, present
from adiv_monitor.alignment.sums import ROUTED, Sums, layer_sums, table_sums
from adiv_monitor.capture.selection import trainable
from adiv_monitor.errors import AdivError
from adiv_monitor.report import AlignmentReading


class Alignment:
    """Instrument that reads alpha, omega, u and A(W, z) of a model's layers.

    Every reading takes one forward pass of the probe and four products per layer. It changes
    nothing in the model or the run.

    Args:
        model: the model; lazy layers must have run.
        probe: the batch on which the model is run, and the choice of the reference point.

    Raises:
        AdivError: the forward pass uses no layer that can be measured.
        TypeError: `probe` is no `Probe`, or the model can't be called with its batch.
        ValueError: one of the probe's patterns fits no layer.

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
        seen, self.refused = look(model, probe)
        self._shapes = {path: layer.shapes for path, layer in seen.items()}
        self.layers: tuple[AlignedLayer, ...] = with_roles(
            [layer.aligned(path) for path, layer in seen.items()], probe.roles
        )
        self._snapshots: deque[Snapshot] = deque(maxlen=probe.window or 1)
        if probe.reference is None:
            self._snapshots.append(Snapshot.of(seen))
        else:
            self._regenerated()  # fail early if it can't be

    @property
    def unmeasured(self) -> list[str]:
        """Names of trained parameters with two dimensions other than 1 that no layer here uses."""
        used = {id(p) for layer in self.layers for p in layer.parameters}
        return [
            name
            for name, p in self._model.named_parameters()
            if p.requires_grad and is_matrix(p) and id(p) not in used
        ]

    def read(self) -> dict[str, AlignmentReading]:
        """Return the present readings by layer.

        Raises:
            AdivError: the model's calls of its layers differ from those at the reference point.
        """
        with torch.inference_mode(False):
            return self._read()

    def _read(self) -> dict[str, AlignmentReading]:
        seen = self._look(self._model)
        self._check(seen)
        reference = self._regenerated() if self._probe.reference else self._snapshots[0]
        weights = {layer.weight.key: layer.weight for layer in seen.values()}

        @lru_cache(maxsize=1)  # holds one unsharded weight at a time
        def whole(key: str) -> tuple[Tensor, Tensor]:
            """Return (W₀, W)."""
            device = weights[key].value.device
            return reference.weights[key].whole(device), present(weights[key])

        of_layers = []
        for path in (layer.path for layer in self.layers):
            layer, z0 = seen[path], reference.rows[path]
            pair = whole(layer.weight.key)
            of_layers.append(_sums(layer, z0, *pair, spectral=self._probe.spectral))
        sums = torch.stack(of_layers)
        if self._probe.process_group is not None:
            dist.all_reduce(sums, group=self._probe.process_group)
        if self._probe.window is not None:
            self._snapshots.append(Snapshot.of(seen))
        return {
            layer.path: Sums(*of_layer).reading(layer)
            for layer, of_layer in zip(self.layers, sums.tolist(), strict=True)
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the reference point, for a resumed run."""
        return {
            "probe": self._probe.fingerprint,
            "snapshots": [
                {
                    "rows": {path: rows.cpu() for path, rows in snapshot.rows.items()},
                    "weights": {name: kept.values for name, kept in snapshot.weights.items()},
                }
                for snapshot in self._snapshots
            ],
        }

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
        device = next(trainable(self._model)).device
        kept = self._snapshots[0].weights if self._snapshots else {}
        loaded = []
        for saved in state["snapshots"]:
            if saved["rows"].keys() != self._shapes.keys():
                raise ValueError(
                    "Alignment.load_state_dict: the saved reference point has the layers "
                    f"{list(saved['rows'])}, expected {list(self._shapes)}"
                )
            own = self._snapshots[0].rows if self._snapshots else {}
            for path, rows in own.items():
                if rows.shape != saved["rows"][path].shape:
                    raise ValueError(
                        "Alignment.load_state_dict: the saved reference point has inputs of shape "
                        f"{tuple(saved['rows'][path].shape)} in {path!r}, expected "
                        f"{tuple(rows.shape)}: that of a model of the same width"
                    )
            loaded.append(
                Snapshot(
                    {path: rows.to(device) for path, rows in saved["rows"].items()},
                    {n: replace(kept[n], values=values) for n, values in saved["weights"].items()},
                )
            )
        self._snapshots.clear()
        self._snapshots.extend(loaded)

    def _look(self, model: nn.Module) -> dict[str, Seen]:
        return look(model, self._probe)[0]

    def _regenerated(self) -> Snapshot:
        assert self._probe.reference is not None
        parameter = next(trainable(self._model))
        with torch.random.fork_rng(devices=_devices(self._model)):
            model = self._probe.reference()
        seen = self._look(model.to(parameter.device))
        self._check(seen)
        return Snapshot.of(seen)

    def _check(self, seen: Mapping[str, Seen]) -> None:
        shapes = {path: layer.shapes for path, layer in seen.items()}
        if shapes != self._shapes:
            paths = {**shapes, **self._shapes}
            path = next(p for p in paths if shapes.get(p) != self._shapes.get(p))
            raise AdivError(
                f"Alignment: '{path}' was called with rows {shapes.get(path)}, expected "
                f"{self._shapes.get(path)} as at the reference point: z − z₀ has to be of the same "
                "samples"
            )


def _sums(seen: Seen, z0: Tensor, before: Tensor, now: Tensor, *, spectral: bool) -> Tensor:
    with torch.no_grad(), torch.autocast(now.device.type, enabled=False):
        W0, W = map(seen.matrices.matrices, (before, now))
        if seen.is_table:
            return table_sums(W0[0], W[0], seen.features)
        if seen.kind == ROUTED:
            return layer_sums(W, W, seen.rows, seen.rows, seen.block, spectral=spectral)
        return layer_sums(W0, W, z0, seen.rows, seen.block, spectral=spectral)


def _devices(model: nn.Module) -> list[torch.device]:
    devices = {p.device for p in model.parameters()}
    return [device for device in devices if device.type == "cuda"]
