"""One measured step: from the rows and the parameter step to readings.

Everything stays on the device until `outcome`, which makes one transfer.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from adiv_layers.autocast import without_autocast
from torch import Tensor

from adiv_monitor import dots, measures
from adiv_monitor.batch import alike, measure
from adiv_monitor.capture import Capture
from adiv_monitor.dots import Dots
from adiv_monitor.features.features import Features
from adiv_monitor.outcome import STEP, Looked, Outcome, fetch, refusal, understand
from adiv_monitor.selection import Layer
from adiv_monitor.updates import ParameterStep, Watch, checksum, gradients


@dataclass
class _Measured:
    """What is known of one layer so far."""

    layer: Layer
    features: Features
    G: Tensor  # (rows, n_total)
    rows_seen: int
    rows_total: int
    step: ParameterStep | None  # None without an optimizer
    gradient_scale: Tensor | float  # the gradient tensors are this times the gradient
    dots: Dots
    values: dict[str, Tensor]  # of which nothing more is to be computed

    def release(self) -> None:
        """Let go of the rows."""
        del self.features, self.G
        if self.step is not None:
            self.step.release()


class MeasuredStep:
    """Follows one step through gradient, update and what is applied in the end.

    Args:
        capture: the rows; its hooks stay on until the step is taken, which may raise before.
        layers: the layers that `capture` watches.
        watch: what this run was seen to do so far.
        fail: called with a layer and the exception met while measuring it.
    """

    def __init__(
        self,
        capture: Capture,
        layers: list[Layer],
        watch: Watch,
        fail: Callable[[Layer, Exception], None],
    ) -> None:
        self._capture = capture
        self._unreached: dict[str, str] = {}
        self.skipped: Tensor | None = None  # > 0: a fused optimizer found inf and did nothing
        self._moved: Tensor | None = None  # did the weights move before the gradient was there?
        self._layers = layers
        self._watch = watch
        self._fail = fail
        self._measured: dict[str, _Measured] = {}

    @torch.no_grad()
    def gradient_is_final(self, gradient_scale: Tensor | float, *, steps: bool) -> None:
        """The gradients are what the optimizer will use: e, and a copy of the parameters.

        Args:
            gradient_scale: what a fused optimizer will divide them by during its step (AMP).
            steps: whether an optimizer step follows.
        """
        self._measured.clear()  # what an earlier attempt at this step, which raised, has left
        self._unreached.clear()
        for layer in self._layers:
            if layer.path in self._capture.rows:
                self._try(layer, self._begin, layer, gradient_scale, steps)

    @torch.no_grad()
    def updated(self) -> None:
        """The optimizer has stepped: u and d."""
        for measured in list(self._measured.values()):
            self._try(measured.layer, self._measure_update, measured)

    @torch.no_grad()
    def applied(self) -> None:
        """The next forward pass begins, or there is none: a."""
        for measured in list(self._measured.values()):
            self._try(measured.layer, self._measure_applied, measured)

    def weights(self) -> list[Tensor]:
        """Checksums of all weights, to be compared by `weights_moved`."""
        return [checksum(p) for layer in self._layers for p in layer.parameters]

    def weights_moved(self, before: list[Tensor]) -> None:
        """The closure has run: an optimizer that moved the weights first has no one gradient."""
        if before:
            moved = [x != y for x, y in zip(self.weights(), before, strict=True)]
            self._moved = torch.stack([flag.to(moved[0].device) for flag in moved]).any()

    def discard(self) -> None:
        """The step turned out not to be measurable."""
        self._measured.clear()

    @torch.no_grad()
    def outcome(self) -> Outcome:
        """Bring everything to the host at once, and say what it means."""
        refusals = {"skipped": self.skipped, "moved": self._moved}
        batches = [
            (paths, measure(stacked))
            for paths, stacked in alike({p: m.dots for p, m in self._measured.items()})
        ]
        batches += alike({path: m.values for path, m in self._measured.items()})
        batches += alike({STEP: {name: t for name, t in refusals.items() if t is not None}})
        fetched = fetch(batches)
        refused = [name for name, value in fetched.get(STEP, {}).items() if value[0]]
        if refused:
            return refusal(refused)
        looked = {
            path: Looked(m.layer.rule.kind, m.rows_seen, m.rows_total)
            for path, m in self._measured.items()
        }
        fetched = {path: fetched[path] for path in looked}  # in the model's order
        found = understand(looked, fetched, self._unreached, self._watch)
        return replace(found, notes=[*self._capture_notes(), *found.notes])

    def _capture_notes(self) -> list[str]:
        notes = []
        if self._capture.dropped():
            notes.append(
                "Gradients were zeroed before a step was taken (a step that an AMP scaler "
                "skipped?): their rows are not in this report."
            )
        if _processes() > 1:
            notes.append(
                f"One of {_processes()} processes: the rows are its own, the gradient is taken to "
                "be the average over all of them, and clipping or AMP scaling since are not seen."
            )
        return notes

    def _try(self, layer: Layer, function: Callable[..., None], *args: object) -> None:
        try:
            with without_autocast(layer.parameters[0]):
                function(*args)
        except Exception as error:
            self._measured.pop(layer.path, None)
            self._fail(layer, error)

    def _begin(self, layer: Layer, gradient_scale: Tensor | float, steps: bool) -> None:
        rows = self._capture.rows[layer.path]
        rows.finish()
        reached = [call for call in rows.calls if call.gradient is not None]
        if not reached:
            self._unreached[layer.path] = _why_unreached(layer, called=bool(rows.calls))
            return
        features = reached[0].features.joined([call.features for call in reached[1:]])
        G = _joined([call.gradient for call in reached if call.gradient is not None])
        values: dict[str, Tensor] = {}
        factor = self._capture.gradient_factor(layer)
        if _processes() > 1:  # the gradient is averaged; what else was done to it can't be told
            factor = G.new_tensor(1 / _processes())
        if isinstance(gradient_scale, Tensor):
            factor = (1.0 if factor is None else factor) / gradient_scale
        if factor is not None:
            values["gradient_factor"] = factor
            G *= factor
        if rows.linear is not None:
            values["rule_error"] = rows.linear
        step = self._parameter_step(layer, gradient_scale) if steps else None
        e = dots.added(*_act(layer, features, gradients(layer.parameters)))
        if isinstance(gradient_scale, Tensor):
            e = e / gradient_scale
        blocks = G.view(len(G), features.groups, G.shape[1] // features.groups)
        found = dots.of_gradient(features.scale(), blocks, e)
        found["z_z"] = _joined([call.z_squared for call in reached])
        if rows.ceiling is not None and rows.ceiling_is_whole:
            values["attainable_cosine"] = rows.ceiling.cosine()
        self._measured[layer.path] = _Measured(
            layer,
            features,
            G,
            rows_seen=len(G),
            rows_total=sum(call.rows.total for call in reached),
            step=step,
            gradient_scale=gradient_scale,
            dots=found,
            values=values,
        )
        rows.calls.clear()

    def _parameter_step(self, layer: Layer, gradient_scale: Tensor | float) -> ParameterStep:
        # An optimizer that unscales AMP gradients itself writes them back.
        unscales = isinstance(gradient_scale, Tensor)
        return ParameterStep(layer.parameters, self._watch, copy_gradient=unscales)

    def _measure_update(self, measured: _Measured) -> None:
        step, layer = measured.step, measured.layer
        assert step is not None
        step.stepped()
        found = dots.of_update(*_act(layer, measured.features, step.update), measured.G)
        measured.dots |= found | step.products()
        if layer.shared:  # γ is then not this layer's alone: from its rows
            share = measured.rows_total / max(measured.rows_seen, 1)
            measured.values["descent"] = measures.descent(found["d_G"]) * share
        else:  # over all rows, whatever rows were looked at
            measured.values["descent"] = -measured.dots["u_gamma"] / measured.gradient_scale
        assert step.gradient_changed is not None
        measured.values["gradient_changed"] = step.gradient_changed
        if not step.has_copies:
            measured.values["gradient_lost"] = step.gradient_changed
        measured.release()

    def _measure_applied(self, measured: _Measured) -> None:
        if measured.step is not None:
            measured.values["weights_changed"], found = measured.step.applied()
            measured.dots |= found


def _act(
    layer: Layer, features: Features, parts: list[Tensor]
) -> tuple[Tensor | None, Tensor | None]:
    """Φ_W Wᵀ and φ_b ⊗ b, (rows, n_total), for one tensor per trained parameter."""
    tensors = iter(parts)
    weight = None if layer.weight is None else features.by_weight(next(tensors))
    bias = None if layer.bias is None else features.by_bias(next(tensors))
    return weight, bias


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _processes() -> int:
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if distributed else 1


def _why_unreached(layer: Layer, *, called: bool) -> str:
    if any(parameter.grad is not None for parameter in layer.parameters):
        if called:
            return (
                "its parameters have a gradient, but none came through the output of its forward: "
                "that was changed in place as a view, or the gradient is of an earlier step"
            )
        return (
            "its parameters have a gradient, but its forward was not called: another module, or "
            "compiled code, uses them directly"
        )
    return "no gradient reached it in this step"
