"""One measured step: from the rows and the parameter step to what the host needs.

Everything stays on the device until `outcome`, which makes one transfer.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from adiv_layers.autocast import without_autocast
from torch import Tensor

from adiv_monitor import dots, totals
from adiv_monitor.capture import Capture
from adiv_monitor.features.features import DenseFeatures, Features, OneHotFeatures
from adiv_monitor.features.rows import exact, to_device
from adiv_monitor.layer_rows import Call
from adiv_monitor.outcome import Looked, Outcome, understand
from adiv_monitor.selection import Layer
from adiv_monitor.totals import AllRows
from adiv_monitor.transfer import fetch
from adiv_monitor.updates import ParameterSteps, Watch, gradient, weight_norms


@dataclass
class _Measured:
    """What is known of one layer so far."""

    layer: Layer
    looked: Looked
    features: Features
    vectors: dict[str, Tensor]  # (rows, n_total) each
    values: dict[str, Tensor] = field(default_factory=dict)  # for the host

    def release(self) -> None:
        """Let go of the rows."""
        del self.features, self.vectors


class MeasuredStep:
    """Follows one step through gradient, update and what is applied in the end.

    Args:
        capture: the rows; its hooks are removed when the gradient is final.
        layers: the layers that `capture` watches.
        watch: what this run was seen to do so far.
        fail: called with a layer and the exception met while measuring it.
        generator: the monitor's own source of chance.
    """

    def __init__(
        self,
        capture: Capture,
        layers: list[Layer],
        watch: Watch,
        fail: Callable[[Layer, Exception], None],
        generator: np.random.Generator,
    ) -> None:
        self._capture = capture
        self._unreached: dict[str, str] = {}
        self.skipped: Tensor | None = None  # > 0: a fused optimizer found inf and did nothing
        self._moved: Tensor | None = None  # did the weights move before the gradient was there?
        self._layers = layers
        self._watch = watch
        self._fail = fail
        self._generator = generator
        self._measured: dict[str, _Measured] = {}
        self._all_rows: dict[str, AllRows] = {}
        self._steps: ParameterSteps | None = None
        self._flags: dict[str, Tensor] = {}  # of the step as a whole

    @torch.no_grad()
    def gradient_is_final(self, gradient_scale: Tensor | float, *, steps: bool) -> None:
        """The gradients are what the optimizer will use: e, and a copy of the parameters.

        Args:
            gradient_scale: what a fused optimizer will divide them by during its step (AMP).
            steps: whether an optimizer step follows.
        """
        self._measured.clear()  # what an earlier attempt at this step, which raised, has left
        self._unreached.clear()
        self._all_rows.clear()
        self._flags.clear()
        # An optimizer that unscales AMP gradients itself writes them back.
        scale = gradient_scale if isinstance(gradient_scale, Tensor) else None
        for layer in self._layers:
            if layer.path in self._capture.rows:
                self._try(layer, self._begin, layer, scale)
        self._capture.detach()
        for path, found in totals.sums(self._all_rows, self._generator).items():
            self._measured[path].values |= found
        self._all_rows.clear()
        if scale is not None:
            self._flags["gradient_scale"] = scale
        parameters = {id(p): p for m in self._measured.values() for p in m.layer.parameters}
        self._steps = ParameterSteps(
            parameters.values(), self._watch, copy_gradient=scale is not None
        )
        if not steps:
            for measured in list(self._measured.values()):
                self._try(measured.layer, self._finish_rows, measured)

    @torch.no_grad()
    def updated(self) -> None:
        """The optimizer has stepped: u and d."""
        if self._steps is None or not self._measured:
            return
        self._steps.stepped()
        for measured in list(self._measured.values()):
            self._try(measured.layer, self._measure_update, measured)
        self._flags["gradient_changed"] = self._steps.finish_update()

    @torch.no_grad()
    def applied(self) -> None:
        """The next forward pass begins, or there is none: a."""
        if self._steps is not None and "w_w" in self._steps.products:
            self._steps.applied()

    def weights(self) -> list[Tensor]:
        """Norms of all weights, to be compared by `weights_moved`."""
        return weight_norms([p for layer in self._layers for p in layer.parameters])

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
        for name, flag in (("skipped", self.skipped), ("moved", self._moved)):
            if flag is not None:
                self._flags[name] = flag
        values, flags, products = fetch(
            {path: m.values for path, m in self._measured.items()},
            self._flags,
            {} if self._steps is None else self._steps.products,
        )
        found = understand(
            {path: m.looked for path, m in self._measured.items()},
            values,
            flags,
            products,
            unreached=self._unreached,
            watch=self._watch,
            keeps_gradient=self._steps is not None and self._steps.has_copies,
        )
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
            self._all_rows.pop(layer.path, None)
            self._fail(layer, error)

    def _begin(self, layer: Layer, gradient_scale: Tensor | None) -> None:
        rows = self._capture.rows[layer.path]
        reached = rows.finish()
        if not reached:
            self._unreached[layer.path] = _why_unreached(layer, called=bool(rows.calls))
            return
        features = reached[0].features.joined([call.features for call in reached[1:]])
        G = _joined([call.gradient for call in reached if call.gradient is not None])
        if isinstance(features, OneHotFeatures):  # nothing trains the padding token: idle
            G = G * features.trained[:, None]
        values: dict[str, Tensor] = {}
        factor, from_rows = self._factor(layer, G, gradient_scale, values)
        if factor is not None:
            G = G * factor.to(G.dtype)
        looked = Looked(
            path=layer.path,
            kind=layer.rule.kind,
            parameters=[id(p) for p in layer.parameters],
            bias_alone=layer.weight is None,
            rows_seen=len(G),
            rows_total=sum(call.rows.total for call in reached),
            groups=features.groups,
            precision=max(call.precision for call in reached),
            from_rows="weighed" if _weighs(features) else from_rows,
        )
        if rows.linear is not None:
            values["rule_error"] = rows.linear
        if rows.ceiling is not None and rows.ceiling_is_whole:
            values["attainable_cosine"] = rows.ceiling.cosine()
        self._add_all_rows(layer.path, reached, values)
        gamma = [gradient(p) for p in layer.parameters]
        if gradient_scale is not None:
            gamma = [g / gradient_scale for g in gamma]
        e = self._plain_step(layer, looked, features, G, gamma, values)
        vectors = {"G": G, "e": e, "z": _joined([call.z for call in reached])}
        measured = _Measured(layer, looked, features, vectors, values)
        self._add_scale(measured)
        self._measured[layer.path] = measured
        rows.calls.clear()

    def _factor(
        self,
        layer: Layer,
        G: Tensor,
        gradient_scale: Tensor | None,
        values: dict[str, Tensor],
    ) -> tuple[Tensor | None, str]:
        """What the gradient was multiplied by since the backward pass; why γ ≠ c·GᵀΦ, if so."""
        accumulated = self._capture.accumulated[layer.parameters[0]]
        factor = accumulated.factor()
        reason = "shared" if layer.shared else ""
        if _processes() > 1:  # the gradient is averaged; what else was done to it can't be told
            factor, reason = G.new_tensor(1 / _processes()), "processes"
        if factor is not None and gradient_scale is not None:
            factor = factor / gradient_scale
        if factor is not None:
            values["gradient_factor"] = factor
            # 0/0: then nothing of the gradient is left to be in any units.
            factor = torch.where(factor.isnan(), 1.0, factor)
        if (likeness := accumulated.likeness()) is not None:
            values["likeness"] = likeness
        if accumulated.foreign is not None:
            values["foreign"] = accumulated.foreign
        return factor, reason

    def _add_all_rows(self, path: str, calls: list[Call], values: dict[str, Tensor]) -> None:
        """What one pass said of all rows, if it did of all calls; else ‖G‖² alone."""
        squares = [call.square for call in calls if call.square is not None]
        if len(squares) < len(calls):  # two passes through one graph: only the sample has their sum
            return
        whole = [call.whole for call in calls if call.whole is not None]
        if len(whole) < len(calls) or not sum(call.rows.total for call in calls):
            values["G_G"] = torch.stack([square.sum() for square in squares]).sum()
            return
        weight_square, scale = [], []
        for i, all_rows in enumerate(whole):
            assert all_rows.weight_square is not None
            weight_square.append(all_rows.weight_square.reshape(-1))
            scale.append(weight_square[-1] + all_rows.bias_square)
            if all_rows.trained is not None:
                squares[i] = squares[i] * all_rows.trained
        self._all_rows[path] = AllRows(_joined(weight_square), _joined(scale), _joined(squares))
        sums = [all_rows.weight_sum for all_rows in whole if all_rows.weight_sum is not None]
        if len(sums) == len(calls):
            common = sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)
            values["weight_sum_square"] = dots.norm(common.flatten()).square()

    def _plain_step(
        self,
        layer: Layer,
        looked: Looked,
        features: Features,
        G: Tensor,
        gamma: list[Tensor],
        values: dict[str, Tensor],
    ) -> Tensor:
        """e, what a plain gradient step would do: Φγᵀ, or (ΦΦᵀ)G where that is less work."""
        rows, outputs = G.shape
        width = sum(g.numel() for g in gamma) / max(outputs, 1)
        if (
            isinstance(features, DenseFeatures)
            and features.has_gram
            and rows == looked.rows_total
            and rows * (width + outputs) < width * outputs
            and not looked.from_rows
            and layer.path not in self._watch.distrusted
        ):
            values["probe"] = self._probe(layer, features, G, gamma)
            return features.gram() @ G
        return added(*act(layer, features, gamma))

    def _probe(
        self, layer: Layer, features: DenseFeatures, G: Tensor, gamma: list[Tensor]
    ) -> Tensor:
        """‖γv − Gᵀ(Φv)‖ and ‖γv‖ for a random v (R. Freivalds 1977): is γ = GᵀΦ?"""
        columns = features.columns()[:, 0]
        v = torch.from_numpy(self._generator.standard_normal(columns.shape[1])).to(G)
        parts = iter(gamma)
        left = G.new_zeros(G.shape[1])
        if layer.weight is not None:
            weight = exact(next(parts))
            n = columns.shape[1] - (layer.bias is not None)
            left = weight.t() @ v[:n] if features.transposed else weight.reshape(-1, n) @ v[:n]
        if layer.bias is not None:
            left = left + exact(next(parts)) * v[-1]
        difference = left - G.T @ (columns @ v)
        norms: Tensor = torch.linalg.vector_norm(torch.stack([difference, left]), dim=1)
        return norms

    def _add_scale(self, measured: _Measured) -> None:
        """The rows' own parts of e, and what the others did to them."""
        vectors, values, features = measured.vectors, measured.values, measured.features
        G, e = vectors["G"], vectors["e"]
        scale = features.scale()
        if scale is None:
            return
        if scale.shape != (len(G), features.groups) or not scale.is_floating_point():
            raise ValueError(
                f"the features' scale() gave {scale.dtype} of shape {tuple(scale.shape)}, expected "
                f"real numbers of shape (rows, groups) = {(len(G), features.groups)}: ‖φ‖² of "
                "every row"
            )
        scale = scale.to(G.dtype)
        blocks = G.view(*scale.shape, G.shape[1] // scale.shape[1])
        own = (scale[..., None] * blocks).flatten(1)
        vectors["own"], vectors["rest"] = own, e - own
        if scale.shape[1] == 1:
            values["scale"] = scale[:, 0]
            return
        # Of a gain, a matrix as large as its features: of it, what is summed over the features.
        pivot = scale[:1, :1]
        shifted = scale - pivot
        values["scale_pivot"] = pivot
        values["scale_sums"] = shifted.sum(1)
        values["scale_squares"] = shifted.square().sum(1)
        values["scale_largest"] = scale.amax(1)
        entries = scale.flatten()
        if len(entries) > totals.MOST_ENTRIES:
            some = self._generator.choice(len(entries), totals.MOST_ENTRIES, replace=False)
            measured.looked.entry_rows = some // scale.shape[1]
            entries = entries.index_select(0, to_device(some, scale.device))
        values["scale_entries_of_rows"] = entries

    def _measure_update(self, measured: _Measured) -> None:
        steps, layer = self._steps, measured.layer
        assert steps is not None
        taken = [steps.taken(p) for p in layer.parameters]
        by_weight, by_bias = act(layer, measured.features, taken)
        measured.vectors["d"] = added(by_weight, by_bias)
        if by_bias is not None and by_weight is not None:
            measured.vectors["bias"] = by_bias
        for parameter, part in zip(layer.parameters, taken, strict=True):
            steps.take_products(parameter, part)
        self._finish_rows(measured)

    def _finish_rows(self, measured: _Measured) -> None:
        vectors, values = measured.vectors, measured.values
        values["products"] = dots.of_rows(list(vectors.values()))
        measured.looked.vectors = tuple(vectors)
        path = measured.looked.path
        if self._watch.expects_idle(path) or "weight_sum_square" not in values:
            self._add_common(measured)
        measured.release()

    def _add_common(self, measured: _Measured) -> None:
        """How alike the active rows are."""
        features = measured.features
        if not isinstance(features, DenseFeatures | OneHotFeatures):
            return
        active = (measured.values["products"][:, 0, 0] != 0).to(measured.vectors["G"].dtype)
        products = features.mean_products(active)
        if products is not None:
            measured.values["common"] = products
            measured.values["weight_square"] = features.weight_squares()


def act(
    layer: Layer, features: Features, parts: list[Tensor]
) -> tuple[Tensor | None, Tensor | None]:
    """Φ_W Wᵀ and φ_b ⊗ b, (rows, n_total), for one tensor per trained parameter."""
    tensors = iter(parts)
    weight = None if layer.weight is None else features.by_weight(next(tensors))
    bias = None if layer.bias is None else features.by_bias(next(tensors))
    return weight, bias


def added(by_weight: Tensor | None, by_bias: Tensor | None) -> Tensor:
    """The two together; one of them is there, since a layer trains a weight or a bias."""
    if by_weight is None or by_bias is None:
        lone = by_bias if by_weight is None else by_weight
        assert lone is not None
        return lone
    return by_weight + by_bias


def _weighs(features: Features) -> bool:
    """Whether the layer's backward pass weighs its rows on purpose, so that γ is not GᵀΦ."""
    if not isinstance(features, DenseFeatures):
        return False
    return features.mixes_rows or features.weight_gain is not None


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
