"""Begins the measurement of every layer once the gradients are final: rows, e and evidence."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from adiv_monitor.capture.check import Equations, of_gradient
from adiv_monitor.capture.layer_rows import Call, LayerRows, versions
from adiv_monitor.capture.layers import class_name
from adiv_monitor.capture.selection import Layer
from adiv_monitor.capture.weights.pieces import Key, Parts
from adiv_monitor.capture.weights.shards import holders, world_size
from adiv_monitor.features.features import DenseFeatures, Features, JacobianFeatures, OneHotFeatures
from adiv_monitor.features.rows import joined
from adiv_monitor.maths import totals
from adiv_monitor.maths.ceiling import attainable_cosine
from adiv_monitor.maths.sums import About
from adiv_monitor.maths.totals import AllRows
from adiv_monitor.step.own_measures import Kept, kept
from adiv_monitor.step.parameter_steps import ParameterSteps
from adiv_monitor.step.transfer import Outgoing
from adiv_monitor.step.vectors import Block, Fail, LayerInProgress, blocks_of

F = TypeVar("F", bound=Features)
# With Jacobian features there is no mean feature, and no parameter is known to be a bias.
_WITHOUT_FEATURES = ("common_share", "bias_share")
_MOVED = (
    "The weights of {} were written to between the backward pass and the optimizer's step "
    "(weight decay by hand, a perturbation that was undone?): this change is neither in the "
    "update nor in the applied update."
)
_WITHOUT_CEILING = (
    "attainable_cosine of {} is missing: it needs the rows of all ranks in one place."
)


@dataclass(eq=False)
class FinalGradient:
    """Begins the measured layers when the gradients are those that the optimizer will use.

    Attributes:
        generator: the monitor's own random numbers.
        own: names of the measures of the user's own: for these, rows are kept until the step is
            taken.
        out: takes the numbers for the host.
        reached: paths of the layers that a gradient reached.
        measured: by path, the layers that have begun.
        pieces: by path, the share of the layer's dot products of parameters that counts here.
        noted: paths of layers by the note about them, with {} in place of the paths.
        blocks: the measured layers' rows, once all have begun.
        kept: by path, the rows that are kept.
    """

    generator: np.random.Generator
    own: tuple[str, ...] = ()
    out: Outgoing = field(default_factory=Outgoing)
    reached: list[str] = field(default_factory=list)
    measured: dict[str, LayerInProgress] = field(default_factory=dict)
    pieces: dict[str, dict[Key, float]] = field(default_factory=dict)
    noted: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    blocks: list[Block] = field(default_factory=list)
    kept: dict[str, Kept] = field(default_factory=dict)
    _all_rows: dict[str, list[AllRows]] = field(default_factory=dict)

    def start(
        self, captured: dict[Layer, LayerRows], steps: ParameterSteps, *, updates: bool
    ) -> None:
        """Prepare for the layers to begin.

        Args:
            captured: the layers that a gradient reached; a layer is removed as it begins, so that
                its rows are released.
            steps: the gradients of all pieces.
            updates: whether an optimizer step follows.
        """
        self._captured, self._steps, self._updates = captured, steps, updates
        self.reached = [layer.path for layer in captured]
        self._is_alone = world_size() == 1

    def forget(self, path: str) -> None:
        """Drop a layer from this step."""
        self.measured.pop(path, None)
        self._all_rows.pop(path, None)
        self.out.forget(path)

    def _equations(
        self, layer: Layer, rows: LayerRows, parts: Parts, h: Equations
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return γv, h and γv of the gradient that was there before; see `StepSums`."""
        features = next(call.features for call in rows.calls if call.arrived)
        # Of a layer whose bias alone is checked, h has no part of the weight, and neither has γv.
        now = of_gradient(features, *layer.change(self._steps.gamma(parts)), rows.v)
        sides = [now, h, *([] if rows.earlier is None else [rows.earlier])]
        of_weight, of_bias = (
            tuple(x for x in of if x is not None) for of in zip(*sides, strict=True)
        )
        return of_weight, of_bias

    def begin(self, layer: Layer, parts: Parts) -> None:
        """Begin a layer: join the rows of its calls, compute e, and release the captured rows.

        Args:
            layer: the layer.
            parts: γ of the pieces that were all-gathered.
        """
        rows = self._captured.pop(layer)
        h, calls = rows.sums(), rows.finish()
        features, G = _joined_rows([x.features for x in calls], [x.gradient for x in calls])
        self.pieces[layer.path] = {
            p.key: 1 / holders(p.parameter) if parts else 1.0 for p in layer.pieces
        }
        if self._updates and rows.versions != versions(layer):
            self.noted[_MOVED].append(layer.path)
        change = layer.change(self._steps.gamma(parts))
        e = features.move(*change) if parts else None
        self.out.begin(
            layer.path,
            _about(layer, features, self.own),
            precision=max([call.precision for call in calls]),
            reason=_why_from_rows(features, shared=rows.is_shared),
            total=sum([call.rows.total for call in calls]),
            partial=bool(parts),
        )
        if h is not None and not rows.is_shared:
            for of_bias, sides in enumerate(self._equations(layer, rows, parts, h)):
                if sides:
                    columns = dict(zip(("now", "h", "before"), sides, strict=False))
                    self.out.add(
                        *("equations", [layer.path], columns),
                        of_bias=of_bias,
                        number=np.arange(len(sides[0])),
                    )
        if rows.linear is not None:
            self.out.add("layers", [layer.path], {"rule_error": rows.linear})
        self._send_ceiling(layer, calls)
        of_calls = [(call.norms, call.whole) for call in calls if call.norms is not None]
        if len(of_calls) == len(calls):  # after two passes through one graph it is unknown
            self._all_rows[layer.path] = of_calls
        loads = [whole.loads for _, whole in of_calls if whole and whole.loads is not None]
        if loads:
            number = np.arange(len(loads[0]))
            self.out.add("loads", [layer.path], {"rows": torch.stack(loads).sum(0)}, number=number)
        z = joined([call.z for call in calls])
        self.measured[layer.path] = LayerInProgress(layer, features, G, z, change, e)
        if self.own and not parts and (own := kept(layer, features, G, z)) is not None:
            self.kept[layer.path] = own
        rows.release()

    def finish(self, lose: Fail) -> None:
        """Compute e of all layers and the sums over all rows, after all layers have begun.

        Args:
            lose: called with a layer's path and the exception that was raised.
        """
        for of in totals.sums(self._all_rows):
            self.out.add("layers", of.paths, of.columns, knows_scales=of.knows_scales)
        self._all_rows.clear()
        self.blocks = blocks_of([*self.measured.values()], lose, updates=self._updates)
        for block in self.blocks:
            block.plain_step(lose)

    def _send_ceiling(self, layer: Layer, calls: Sequence[Call]) -> None:
        """Send `attainable_cosine`, or note why it is missing."""
        every = [call.every_row for call in calls if call.every_row is not None]
        if len(every) < len(calls):  # not asked for, or not known for such features
            return
        if not self._is_alone:
            self.noted[_WITHOUT_CEILING].append(layer.path)
            return
        rows = _joined_rows(every, [call.every_gradient for call in calls])
        found = {"attainable": attainable_cosine(*rows)}
        self.out.add("layers", [layer.path], found, has_attainable=True)


def _joined_rows(of_calls: Sequence[F], gradients: Sequence[Tensor | None]) -> tuple[F, Tensor]:
    """Return features and ∂L/∂z of the rows of all calls."""
    first, *others = of_calls
    features = first.joined(others) if others else first
    G = joined([gradient for gradient in gradients if gradient is not None])
    if isinstance(features, OneHotFeatures):  # the padding token is not trained
        G = G * features.trained[:, None]
    return features, G


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
