"""One measured step: from sampled rows and the parameters' step to the numbers for the host.

All tensors stay on the device until `contribution`, which makes one transfer.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from adiv_layers.autocast import without_autocast
from torch import Tensor, nn

from adiv_monitor.capture.capture import Capture
from adiv_monitor.capture.selection import Layer, listed
from adiv_monitor.capture.weights.pieces import Parts, gradient
from adiv_monitor.features.uses import Refused
from adiv_monitor.maths.attention_sums import merge
from adiv_monitor.maths.sums import REALISED, names_of
from adiv_monitor.report import StepReport
from adiv_monitor.step.final_gradient import FinalGradient
from adiv_monitor.step.parameter_steps import ParameterSteps
from adiv_monitor.step.rank_contribution import RankContribution, make_contribution
from adiv_monitor.step.run_history import RunHistory
from adiv_monitor.step.transfer import Outgoing, fetch
from adiv_monitor.step.unsharded import WHY_NOT, UnshardedParameters, spread
from adiv_monitor.step.vectors import Change, LayerInProgress, losing
from adiv_monitor.step.whole_model import WholeModel

if TYPE_CHECKING:
    from adiv_monitor.step.probing import ProbeStep

_MOVED_BEFORE = (
    "The optimizer moved the weights before the gradient was computed (as SAM does), so its "
    "update does not start where the gradient was computed: not measured."
)


class MeasuredStep:
    """Follows one step through its gradient, the optimizer's update and the applied change.

    Args:
        capture: the rows; its hooks stay on until the step is taken, since the step may raise.
        history: the habits that this run has shown so far.
        fail: called with a layer's path and the exception that measuring it raised.
        generator: the monitor's own random numbers.
        probe: measures on the probe what was requested; None: nothing was.
        agree: asks the other ranks whether all of them reach a point of the step.
        whole: follows the whole model.
    """

    def __init__(
        self,
        capture: Capture,
        history: RunHistory,
        fail: Callable[[str, Exception], None],
        generator: np.random.Generator,
        probe: "ProbeStep | None",
        agree: Callable[[str], bool],
        whole: WholeModel,
    ) -> None:
        self._capture = capture
        self._probe = probe
        self._whole = whole
        self._unreached: dict[str, str] = {}
        self._refused: set[str] = set()  # paths of layers that had rows, but were refused
        self.discarded = False  # whether the step can't be measured
        self.moved = False  # whether weights moved before the gradient was computed
        self._selection = capture.selection
        self._unsharded = UnshardedParameters(capture.selection, agree)
        self._history = history
        self._fail = fail
        self._generator = generator
        self._gradient: FinalGradient | None = None
        self._steps: ParameterSteps | None = None
        self._out = Outgoing()

    @torch.no_grad()
    def gradient_is_final(
        self, *, steps: bool, scale: Tensor | None = None, skipped: Tensor | None = None
    ) -> None:
        """Compute e, and copy the parameters: the gradients are those that the optimizer will use.

        Args:
            steps: whether an optimizer step follows.
            scale: the number by which a fused optimizer divides them in its step (AMP); None: 1.
                An optimizer that unscales AMP gradients itself writes them back.
            skipped: > 0 if a fused optimizer found inf and skips this step.
        """
        self._gradient = None  # left over from an earlier attempt at this step, which raised
        self._unreached.clear()
        self._out = Outgoing()
        self._out.flags["skipped"] = [] if skipped is None else [skipped]
        reached = self._capture.finish()
        self._whole.gradient_is_final(self._capture, self._out.flags)
        self._unreached |= self._capture.unreached
        try:
            # Of all due parameters: the layers that were reached differ between ranks.
            self._unsharded.gradients(set(map(id, self._selection.due_parameters)))
            pieces = [piece for layer in reached for piece in layer.pieces]
            self._steps = ParameterSteps(
                pieces,
                self._history,
                scale=scale,
                new=not self._history.knows({layer.path for layer in reached}),
            )
            found = self._gradient = FinalGradient(
                reached,
                self._history,
                self._steps,
                self._generator,
                self._capture.passes,
                self._out,
                updates=steps,
            )
            unscaled = gradient if scale is None else lambda p: gradient(p) / scale
            self._measure(tuple(reached), found.begin, unscaled)
        finally:
            self._unsharded.settle()
        with _without_autocast(x.G for x in found.measured.values()):
            found.finish(self._lose)
        if steps:
            self._steps.keep_parameters()
            self._unsharded.keep(self._steps)
        if self._probe is not None:
            self._probe.gradient_is_final(self._capture, updates=steps)
        if not steps:
            self._finish()

    @property
    def _measured(self) -> dict[str, LayerInProgress]:
        return {} if self._gradient is None else self._gradient.measured

    @torch.no_grad()
    def updated(self) -> None:
        """Compute u and d: the optimizer has stepped."""
        self._whole.updated(self._out.flags)
        if self._probe is not None:  # first, while the copies of all parameters still exist
            self._probe.attended()
        if self._steps is None or not (self._measured or self._unsharded.all_participate):
            return
        self._steps.stepped()
        measured = self._measured.items() if self._selection.shards else ()
        apart = {path: x.layer for path, x in measured if spread(x.layer)}
        try:
            self._unsharded.updates()
            taken = partial(self._unsharded.taken, self._steps)
            self._measure(apart.values(), self._update, taken)
        finally:
            self._unsharded.settle()
        assert self._gradient is not None
        with _without_autocast(x.G for x in self._measured.values()):
            for block in self._gradient.blocks:
                block.update(self._change, self._measured.keys() - apart, self._lose)
        self._finish()  # first: the product with γ overwrites the difference
        self._out.flags["gradient_changed"] = [self._steps.finish_update()]
        if self._probe is not None:
            self._probe.updated()
            for path, moved in self._probe.realised.items():
                columns = dict(zip(names_of(REALISED), moved.products, strict=True))
                self._out.add("moves", [path], columns)
                self._out.add("layers", [path], {}, moved=moved.total)
            if self._probe.loss_change is not None:
                change, changes = self._probe.loss_change
                self._out.flags["loss_change"] = [change]
                self._out.flags["loss_changes"] = [] if changes is None else [changes]

    @torch.no_grad()
    def applied(self) -> None:
        """Compute a, as the next step begins or training ends."""
        if self._steps is not None and "w_w" in self._steps.products:
            differs = self._steps.applied()
            self._out.flags["weights_changed"] = [] if differs is None else [differs]

    def discard(self) -> None:
        """Drop the step: it can't be measured."""
        self._measured.clear()
        self._out = Outgoing()
        self.discarded = True
        if self._probe is not None:
            self._probe.discard()

    @torch.no_grad()
    def contribution(self, number: int) -> RankContribution:
        """Transfer all numbers to the host at once, and return this rank's contribution.

        Args:
            number: number of the step.
        """
        steps, probe, passes, capture = (
            self._steps,
            self._probe,
            self._capture.passes,
            self._capture,
        )
        self._out.flags |= {
            "loss_gradients": [*passes.losses],
            "zeroed": [*passes.norms],
            "batch": [*capture.watching.batch],
            "next_batch": [*capture.next_batch],
            **({} if steps is None else {name: [*of] for name, of in steps.products.items()}),
        }
        sums, flags, attention = fetch(self._out, {} if probe is None else probe.attention())
        notes = [*self._capture_notes(), *(() if probe is None else probe.notes)]
        part = make_contribution(
            sums,
            flags,
            {} if self._gradient is None else self._gradient.pieces,
            () if steps is None else steps.keys,
            StepReport(number, {}, self._unreached, 0.0, tuple(notes)),
            keeps_gradient=steps is not None and steps.has_copies,
        )
        if self.moved:
            report = StepReport(number, {}, {}, 0.0, tuple(notes))
            part = RankContribution(report, refused=(*part.refused, _MOVED_BEFORE))
        self._whole.describe(part, flags)
        if not (part.refused or self.discarded):
            given = ([*map(float, flags[name])] for name in ("loss_gradients", "zeroed"))
            gradients, zeroed = passes.told(*given)
            part.report = replace(
                part.report,
                zeroed_passes=zeroed,
                loss_gradients=tuple(gradients),
                evaluated=capture.evaluated,
                batch=tuple(map(float, flags["batch"])),
                next_batch=tuple(map(float, flags["next_batch"])),
            )
        part.rows_lost = (*part.rows_lost, *self._refused)
        self._history.learn(part)
        if probe is not None and not part.refused:
            part.attention = {path: merge(calls) for path, calls in attention.items()}
            part.no_attention = dict(probe.refused)
        return part

    def _capture_notes(self) -> list[str]:
        notes = self._capture.notes()
        noted = {} if self._gradient is None else self._gradient.noted
        return [*notes, *(note.format(listed(paths)) for note, paths in noted.items())]

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
        with _without_autocast(layer.parameters[0] for layer in layers):
            for layer, parts in self._unsharded.gathered(layers, part):
                try:
                    if parts is None:
                        raise Refused(WHY_NOT)
                    measure(layer, parts)
                except Exception as error:
                    self._lose(layer.path, error)

    def _lose(self, path: str, error: Exception) -> None:
        """Drop a layer and its rows from this step, and report why."""
        self._capture.rows[path].release()
        if self._gradient is not None:
            self._gradient.forget(path)
        if isinstance(error, Refused):
            self._unreached[path] = str(error)
            self._refused.add(path)
        else:
            self._fail(path, error)

    def _update(self, layer: Layer, parts: Parts) -> None:
        """Compute d of a layer whose update was all-gathered."""
        assert self._gradient is not None
        for block in self._gradient.blocks:
            block.update(partial(self._change, parts=parts), (layer.path,), self._lose)

    def _change(self, layer: Layer, parts: Parts | None = None) -> Change:
        """Return the change of a layer's weight and bias; `parts` are its all-gathered pieces."""
        assert self._steps is not None
        taken = self._steps.taken
        change = layer.change({**taken, **parts} if parts else taken)
        if self._probe is not None:
            self._probe.take(layer.path, change)
        return change

    def _finish(self) -> None:
        """Finish the sums of all layers, and release their rows."""
        if self._gradient is None:
            return
        measured, blocks = self._measured, self._gradient.blocks
        with _without_autocast(x.G for x in measured.values()):
            for block in blocks:
                with losing(block.layers, self._lose):
                    block.send(self._out, measured, self._generator)
        measured.clear()
        blocks.clear()


@contextmanager
def _without_autocast(tensors: Iterable[Tensor]) -> Iterator[None]:
    with ExitStack() as stack:
        for first in {tensor.device.type: tensor for tensor in tensors}.values():
            stack.enter_context(without_autocast(first))
        yield
