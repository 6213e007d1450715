"""One measured step on the device: from sampled rows and the parameters' step to sums for the host.

All tensors stay on the device until `Armed.contribution`, which makes one transfer.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from adiv_monitor.capture.capture import Capture
from adiv_monitor.capture.check import Equations, of_gradient
from adiv_monitor.capture.layer_rows import LayerRows, versions
from adiv_monitor.capture.layers import class_name
from adiv_monitor.capture.selection import Layer
from adiv_monitor.capture.weights.pieces import Key, Parts, gradient
from adiv_monitor.capture.weights.shards import holders, world_size
from adiv_monitor.features.features import DenseFeatures, Features, JacobianFeatures, OneHotFeatures
from adiv_monitor.features.rows import joined
from adiv_monitor.features.uses import Refused
from adiv_monitor.maths import totals
from adiv_monitor.maths.ceiling import KNOWN, attainable_cosine
from adiv_monitor.maths.sums import About
from adiv_monitor.maths.totals import AllRows
from adiv_monitor.step.own_measures import Kept, kept, measured
from adiv_monitor.step.parameter_steps import ParameterSteps
from adiv_monitor.step.run_history import RunHistory
from adiv_monitor.step.training import Training
from adiv_monitor.step.transfer import Outgoing
from adiv_monitor.step.unsharded import WHY_NOT, UnshardedParameters, spread
from adiv_monitor.step.vectors import Block, Change, LayerInProgress, blocks_of, losing
from adiv_monitor.step.whole_model import WholeModel

if TYPE_CHECKING:
    from adiv_monitor.step.probing import ProbeStep

F = TypeVar("F", bound=Features)
# With Jacobian features there is no mean feature, and no parameter is known to be a bias.
_WITHOUT_FEATURES = ("common_share", "bias_share")
_MOVED = (
    "The weights of {} were written to between the backward pass and the optimizer's step "
    "(weight decay by hand, a perturbation that was undone?): this change is neither in the "
    "update nor in the applied update."
)
_OWN = "The measure '{}' is NaN in {{}}: {}."
_WITHOUT_CEILING = (
    "attainable_cosine of {} is missing: it needs the rows of all ranks in one place."
)


@dataclass(eq=False)
class MeasuredStep:
    """Follows one step through its gradient, the optimizer's update and the applied change.

    Attributes:
        training: the training, and what is measured in it.
        capture: the rows; its hooks stay on until the step is taken, since the step may raise.
        history: the habits that this run has shown so far.
        fail: called with a layer's path and the exception that measuring it raised.
        probe: measures on the probe what was requested; None: nothing was.
        unsharded: gathers gradients and updates of sharded parameters.
        whole: the whole model.
        refused: why the step can't be measured; "": it can.
        out: takes the numbers for the host.
        reached: paths of the layers that a gradient reached.
        steps: the steps of the parameters; None: the gradient was never final.
        pieces: by path, the share of the layer's dot products of parameters that counts here.
        noted: paths of layers by the note about them, with {} in place of the paths.
    """

    training: Training
    capture: Capture
    history: RunHistory
    fail: Callable[[str, Exception], None]
    probe: "ProbeStep | None"
    unsharded: UnshardedParameters
    whole: WholeModel
    refused: str = ""

    def __post_init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        """Forget what was computed: an earlier attempt at this step may have raised."""
        self.out = Outgoing()
        self.reached: list[str] = []
        self.steps: ParameterSteps | None = None
        self.pieces: dict[str, dict[Key, float]] = {}
        self.noted: dict[str, list[str]] = defaultdict(list)
        self._measured: dict[str, LayerInProgress] = {}  # by path, the layers that have begun
        self._all_rows: dict[str, list[AllRows]] = {}
        self._blocks: list[Block] = []  # their rows, once all have begun
        self._own = self.training.on_rows
        self._kept: dict[str, Kept] = {}  # for the measures of the user's own

    # --- the gradient is final --------------------------------------------------------------------

    @torch.no_grad()
    def gradient_is_final(self, optimizer: Optimizer | None) -> None:
        """Compute e, and copy the parameters: the gradients are those that the optimizer will use.

        Args:
            optimizer: the optimizer that is about to step; None: no step follows.
        """
        updates = optimizer is not None
        # A fused optimizer divides AMP gradients by the scale itself, or finds inf and skips the
        # step; the scaler leaves both here.
        scale, skipped = (getattr(optimizer, name, None) for name in ("grad_scale", "found_inf"))
        scale = scale if isinstance(scale, Tensor) else None
        self._reset()
        self.out.flags["skipped"] = [skipped] if isinstance(skipped, Tensor) else []
        captured = self.capture.finish()
        self.whole.begins(self.capture, self.out.flags)
        self.reached = [layer.path for layer in captured]
        try:
            # Of all due parameters: the layers that were reached differ between ranks.
            self.unsharded.gradients(set(map(id, self.capture.selection.due_parameters)))
            pieces = [piece for layer in captured for piece in layer.pieces]
            self.steps = ParameterSteps(
                [*pieces, *self.unsharded.others(pieces)],
                scale=scale,
                keeps=self.history.changes or not self.history.seen.issuperset(self.reached),
            )
            unscaled = gradient if scale is None else lambda p: gradient(p) / scale
            begin = partial(self._begin, captured, updates)
            self._measure(tuple(captured), begin, unscaled)
        finally:
            self.unsharded.settle()
        for paths, columns, knows_scales in totals.sums(self._all_rows):
            self.out.add("layers", paths, columns, knows_scales=knows_scales)
        self._all_rows.clear()
        self._blocks = blocks_of([*self._measured.values()], self._lose, updates=updates)
        for block in self._blocks:
            block.plain_step(self._lose)
        if updates:
            self.steps.keep_parameters()
        if self.probe is not None:
            self.probe.gradient_is_final(self.capture, updates=updates)
        if not updates:
            self._finish()

    def _begin(
        self, captured: dict[Layer, LayerRows], updates: bool, layer: Layer, parts: Parts
    ) -> None:
        """Begin a layer: join the rows of its calls, compute e, and release the captured rows.

        Args:
            captured: the layers that a gradient reached; this one is removed, so that its rows are
                released.
            updates: whether an optimizer step follows.
            layer: the layer.
            parts: γ of the pieces that were all-gathered.
        """
        assert self.steps is not None
        rows = captured.pop(layer)
        h, calls = rows.sums(), rows.finish()
        features, G = _joined_rows([x.features for x in calls], [x.gradient for x in calls])
        self.pieces[layer.path] = {
            p.key: 1 / holders(p.parameter) if parts else 1.0 for p in layer.pieces
        }
        if updates and rows.versions != versions(layer):
            self.noted[_MOVED].append(layer.path)
        change = layer.change(self.steps.gamma(parts))
        e = features.move(*change) if parts else None
        self.out.about[layer.path] = _about(layer, features, tuple(self._own))
        known: dict[str, float | str] = {
            "precision": max([call.precision for call in calls]),
            "reason": _why_from_rows(features, shared=rows.is_shared),
            "total": sum([call.rows.total for call in calls]),
        }
        self.out.add("layers", [layer.path], {}, partial=bool(parts), **known)
        if h is not None and not rows.is_shared:
            for of_bias, sides in enumerate(_equations(change, rows, h)):
                if sides:
                    columns = dict(zip(("now", "h", "before"), sides, strict=False))
                    number = np.arange(len(sides[0]))
                    self.out.add("equations", [layer.path], columns, of_bias=of_bias, number=number)
        if rows.linear is not None:
            self.out.add("layers", [layer.path], {"rule_error": rows.linear})
        self._send_ceiling(layer, features, G)
        of_calls = [(call.norms, call.whole) for call in calls if call.norms is not None]
        if len(of_calls) == len(calls):  # after two passes through one graph it is unknown
            self._all_rows[layer.path] = of_calls
        loads = [whole.loads for _, whole in of_calls if whole and whole.loads is not None]
        if loads:
            number = np.arange(len(loads[0]))
            self.out.add("loads", [layer.path], {"rows": torch.stack(loads).sum(0)}, number=number)
        z = joined([call.z for call in calls])
        self._measured[layer.path] = LayerInProgress(layer, features, G, z, change, e)
        if self._own and not parts and (own := kept(layer, features, G, z)) is not None:
            self._kept[layer.path] = own
        rows.release()

    def _send_ceiling(self, layer: Layer, features: Features, G: Tensor) -> None:
        """Send `attainable_cosine` of all rows, or note why it is missing."""
        if not (self.training.attainable and isinstance(features, KNOWN)):
            return
        if world_size() > 1:
            self.noted[_WITHOUT_CEILING].append(layer.path)
            return
        found = {"attainable": attainable_cosine(features, G)}
        self.out.add("layers", [layer.path], found, has_attainable=True)

    def _measure(
        self,
        layers: Collection[Layer],
        measure: Callable[[Layer, Parts], None],
        part: Callable[[nn.Parameter], Tensor],
    ) -> None:
        """Measure layers; those whose parameters must be all-gathered come last.

        Args:
            layers: the layers.
            measure: called with a layer and its all-gathered pieces.
            part: returns what this rank has of a parameter's tensor.
        """
        for layer, parts in self.unsharded.gathered(layers, part):
            try:
                if parts is None:
                    raise Refused(WHY_NOT)
                measure(layer, parts)
            except Exception as error:
                self._lose(layer.path, error)

    def _lose(self, path: str, error: Exception) -> None:
        """Drop a layer and its rows from this step, and report why."""
        self.capture.rows[path].release()
        self._measured.pop(path, None)
        self._all_rows.pop(path, None)
        self.out.about.pop(path, None)
        if isinstance(error, Refused):
            self.capture.unreached[path] = str(error)
        else:
            self.fail(path, error)

    # --- the optimizer has stepped ----------------------------------------------------------------

    @torch.no_grad()
    def updated(self) -> None:
        """Compute u and d: the optimizer has stepped."""
        self.whole.ends(self.out.flags)
        if self.probe is not None:
            self.probe.updated(self.out)
        if self.steps is None or not (self._measured or self.unsharded.all_participate):
            return
        self.out.flags["wrote"] = [*self.steps.stepped()]
        every = self._measured.values() if self.capture.selection.shards else ()
        spread_out = [x.layer for x in every if spread(x.layer)]
        try:
            self.unsharded.updates()
            self._measure(spread_out, self._update, self.steps.update_of)
        finally:
            self.unsharded.settle()
        at_once = self._measured.keys() - {layer.path for layer in spread_out}
        for block in self._blocks:
            block.update(self.steps.taken, at_once, self._lose)
        self._measure_own(self.steps)
        self._finish()

    def _update(self, layer: Layer, parts: Parts) -> None:
        """Compute d of a layer whose update was all-gathered."""
        assert self.steps is not None
        taken = {**self.steps.taken, **parts}
        for block in self._blocks:
            block.update(taken, (layer.path,), self._lose)

    def _measure_own(self, steps: ParameterSteps) -> None:
        """Compute the measures of the user's own."""
        for path, of in self._kept.items():
            values: list[Tensor] = []
            taken, now = of[0].change(steps.taken)[0], steps.now(of[0])
            assert taken is not None
            for name, measure in self._own.items():
                value, error = measured(measure, of, taken, now)
                values.append(value)
                if error is not None:
                    why = f"{type(error).__name__}: {error}".partition("\n")[0]
                    self.noted[_OWN.format(name, why)].append(path)
            number, told = np.arange(len(values)), {"value": torch.stack(values)}
            self.out.add("own", [path], told, number=number, rows=len(of[2]))

    def _finish(self) -> None:
        """Finish the sums of all layers, and release their rows."""
        for block in self._blocks:
            with losing(block.layers, self._lose):
                block.send(self.out)
        self._measured.clear()
        self._blocks.clear()

    @torch.no_grad()
    def applied(self) -> None:
        """Compute a, as the next step begins or training ends."""
        if self.steps is not None and "w_w" in self.steps.products:
            self.out.flags["wrote"] += self.steps.applied()

    def discard(self, why: str) -> None:
        """Drop the step: it can't be measured."""
        self._reset()
        self.refused = why
        if self.probe is not None:
            self.probe.discard()


def _joined_rows(of_calls: Sequence[F], gradients: Iterable[Tensor | None]) -> tuple[F, Tensor]:
    """Return features and ∂L/∂z of the rows of all calls."""
    first, *others = of_calls
    features = first.joined(others) if others else first
    G = joined([gradient for gradient in gradients if gradient is not None])
    if isinstance(features, OneHotFeatures):  # the padding token is not trained
        G = G * features.trained[:, None]
    return features, G


def _equations(gamma: Change, rows: LayerRows, h: Equations) -> list[tuple[Tensor, ...]]:
    """Return γv, h and γv of the gradient that was there before, of weight and of bias."""
    features = rows.calls[0].features
    # Of a layer whose bias alone is checked, h has no part of the weight, and neither has γv.
    sides = [of_gradient(features, *gamma, rows.v), h]
    sides += [] if rows.earlier is None else [rows.earlier]
    return [tuple(x for x in of if x is not None) for of in zip(*sides, strict=True)]


def _about(layer: Layer, features: Features, own: tuple[str, ...]) -> About:
    phi = features.phi if isinstance(features, DenseFeatures) else None
    return About(
        kind=layer.kind,
        module=class_name(layer.module),
        features=None if phi is None else phi.shape[-1],
        bias_alone=layer.weight is None,
        undefined=_WITHOUT_FEATURES if isinstance(features, JacobianFeatures) else (),
        own=own,
    )


def _why_from_rows(features: Features, *, shared: bool) -> str:
    """Return the reason, if known in advance, why γ is not GᵀΦ of these rows; else ""."""
    if shared:
        return "shared"
    weighs = isinstance(features, DenseFeatures) and (
        features.mixes_rows or features.weight_gain is not None
    )
    return "weighed" if weighs else ""  # gradient-only layers weigh rows by design
