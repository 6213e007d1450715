"""One measured step: from sampled rows and the parameters' step to the numbers for the host.

All tensors stay on the device until `contribution`, which makes one transfer.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from adiv_layers.autocast import without_autocast
from torch import Tensor

from adiv_monitor.capture.capture import Capture
from adiv_monitor.capture.selection import Layer, listed
from adiv_monitor.capture.weights.pieces import Parts
from adiv_monitor.capture.world import world_size
from adiv_monitor.features.uses import Refused
from adiv_monitor.maths.attention_sums import merge
from adiv_monitor.maths.sums import REALISED, names_of
from adiv_monitor.step.final_gradient import FinalGradient
from adiv_monitor.step.parameter_steps import ParameterSteps, PieceNumbers, weight_norms
from adiv_monitor.step.rank_contribution import RankContribution, learn, make_contribution
from adiv_monitor.step.run_history import RunHistory
from adiv_monitor.step.transfer import Outgoing, fetch
from adiv_monitor.step.unsharded import WHY_NOT, UnshardedParameters, spread
from adiv_monitor.step.vectors import Change, LayerInProgress, losing
from adiv_monitor.step.whole_model import WholeModel

if TYPE_CHECKING:
    from adiv_monitor.step.probing import ProbeStep

_MOVED = (
    "The weights of {} were written to between the backward pass and the optimizer's step "
    "(weight decay by hand, a perturbation that was undone?): this change is neither in the "
    "update nor in the applied update."
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
        # When the gradient is final: whether there is one rank, and whether a step follows.
        self._is_alone = self._takes_step = True
        self._probe = probe
        self._whole = whole
        self._unreached: dict[str, str] = {}
        self._refused: set[str] = set()  # paths of layers that had rows, but were refused
        self.discarded = False  # whether the step can't be measured
        self._moved: Tensor | None = None  # whether weights moved before the gradient was computed
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
        self._is_alone, self._takes_step = world_size() == 1, steps
        self._unreached.clear()
        self._out = Outgoing()
        flags = {"gradient_scale": scale, "skipped": skipped, "moved": self._moved}
        self._out.flags |= {name: [of] for name, of in flags.items() if of is not None}
        reached = self._capture.finish()
        self._whole.gradient_is_final(self._capture, self._out.flags)
        self._unreached |= self._capture.unreached
        try:
            # Of all due parameters: the layers that were reached differ between ranks.
            all_participate = self._unsharded.gradients(
                set(map(id, self._selection.due_parameters))
            )
            pieces = [piece for layer in reached for piece in layer.pieces]
            self._steps = ParameterSteps(
                pieces,
                self._history,
                copy_gradient=scale is not None,
                new=not self._history.knows({layer.path for layer in reached}),
            )
            found = self._gradient = FinalGradient(
                reached,
                self._history,
                self._steps,
                scale,
                self._generator,
                self._capture.passes,
                self._out,
            )
            made = self._unsharded.of_gradients if all_participate else None
            self._measure(tuple(reached), found.begin, made)
        finally:
            self._unsharded.settle()
        with _without_autocast(x.G for x in found.measured.values()):
            found.finish(self._lose, updates=steps)
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
        layers = [x.layer for x in self._measured.values()] if self._unsharded.has_shards else []
        apart = {layer.path: layer for layer in layers if spread(layer)}
        made = partial(self._unsharded.of_updates, steps=self._steps)
        try:
            self._measure(
                apart.values(),
                self._update,
                made if self._unsharded.updates() else None,
            )
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
        if self._steps is not None and self._steps.products.w_w:
            differs = self._steps.applied()
            self._out.flags["weights_changed"] = [] if differs is None else [differs]

    def gradient_stays(self) -> bool:
        """Return whether the gradient is still that of this step, to the last bit."""
        return self._whole.gradient_stays()

    def weights(self) -> list[Tensor]:
        """Return the norms of all weights, for `weights_moved`."""
        return weight_norms(self._selection.parameters)

    def weights_moved(self, before: list[Tensor]) -> None:
        """Note whether the optimizer moved the weights before its closure computed the gradient."""
        if before:
            # NaN differs from itself.
            moved = [
                (x != y) & ~(x.isnan() & y.isnan())
                for x, y in zip(self.weights(), before, strict=True)
            ]
            self._moved = torch.stack([flag.to(moved[0].device) for flag in moved]).any()

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
        steps, passes = self._steps, self._capture.passes
        self._out.flags |= {
            "loss_gradients": [*passes.losses],
            "zeroed": [*passes.norms],
            "batch": [*self._capture.watching.batch],
            "next_batch": [*self._capture.next_batch],
            "classes": [*passes.classes],
        }
        found = fetch(
            self._out,
            PieceNumbers() if steps is None else steps.products,
            {} if self._probe is None else self._probe.attention(),
        )
        part = make_contribution(
            found,
            {} if self._gradient is None else self._gradient.pieces,
            number=number,
            unreached=self._unreached,
            notes=[*self._capture_notes(), *(() if self._probe is None else self._probe.notes)],
            keeps_gradient=steps is not None and steps.has_copies,
        )
        self._whole.describe(part, found.flags)
        if not (part.refused or self.discarded):
            numbers = found.flags
            gradients, zeroed = passes.told(
                [*map(float, numbers["loss_gradients"])], [*map(float, numbers["zeroed"])]
            )
            *targets, met = map(int, next(iter(numbers["classes"]), [0]))
            part.report = replace(
                part.report,
                targets=tuple(targets),
                targets_met=met,
                zeroed_passes=zeroed,
                loss_gradients=tuple(gradients),
                evaluated=self._capture.evaluated,
                batch=tuple(float(of[0]) for of in numbers["batch"]),
                batch_spread=tuple(float(of[1]) for of in numbers["batch"]),
                next_batch=tuple(float(of[0]) for of in numbers["next_batch"]),
            )
        part.rows_lost = (*part.rows_lost, *self._refused)
        learn(self._history, part)
        if self._probe is not None and not part.refused:
            part.attention = {path: merge(calls) for path, calls in found.attention.items()}
            part.no_attention = dict(self._probe.refused)
        return part

    def _capture_notes(self) -> list[str]:
        notes = self._capture.notes()
        if self._gradient is not None:
            notes += [
                f"attainable_cosine of {listed(paths)} is missing: {why}"
                for why, paths in self._gradient.without_ceiling.items()
                if paths
            ]
            if self._gradient.moved and self._takes_step:
                notes.append(_MOVED.format(listed(self._gradient.moved)))
        return notes

    def _measure(
        self,
        layers: Collection[Layer],
        measure: Callable[[Layer, Parts], None],
        made: Callable[[Sequence[Layer]], Iterable[tuple[Layer, Parts]]] | None,
    ) -> None:
        """Measure layers; those whose parameters must be all-gathered come last.

        Args:
            layers: the layers.
            measure: called with a layer and its all-gathered pieces.
            made: all-gathers pieces with the other ranks; None: that is impossible.
        """
        apart = dict.fromkeys(filter(spread, layers)) if self._unsharded.has_shards else {}
        errors: list[Exception] = []
        with _without_autocast(layer.parameters[0] for layer in layers):
            for layer in layers:
                if layer not in apart:
                    self._try(layer, measure, layer, {})
            for layer, parts in made(tuple(apart)) if made else ():
                del apart[layer]
                try:
                    self._try(layer, measure, layer, parts)
                except Exception as error:  # raised here, it would leave the other ranks waiting
                    errors.append(error)
        for layer in apart:
            self._lose(layer.path, Refused(WHY_NOT))
        if errors:
            raise errors[0]

    def _try(self, layer: Layer, function: Callable[..., None], *args: object) -> None:
        try:
            function(*args)
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
                    block.send(self._out, measured, self._generator, is_alone=self._is_alone)
        measured.clear()
        blocks.clear()


@contextmanager
def _without_autocast(tensors: Iterable[Tensor]) -> Iterator[None]:
    with ExitStack() as stack:
        for first in {tensor.device.type: tensor for tensor in tensors}.values():
            stack.enter_context(without_autocast(first))
        yield
