"""One measured step: from sampled rows and the parameters' step to the numbers for the host.

All tensors stay on the device until `contribution`, which makes one transfer.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from adiv_layers.autocast import without_autocast
from torch import Tensor, nn
from torch.optim import Optimizer

from adiv_monitor.capture.capture import Capture
from adiv_monitor.capture.selection import Layer, listed
from adiv_monitor.capture.weights.pieces import Parts, gradient
from adiv_monitor.features.uses import Refused
from adiv_monitor.maths.attention_sums import merge
from adiv_monitor.maths.sums import NO_SUMS, OF_PARAMETERS, Array
from adiv_monitor.report import StepReport
from adiv_monitor.step.final_gradient import FinalGradient
from adiv_monitor.step.own_measures import OwnMeasure, measured
from adiv_monitor.step.parameter_steps import ParameterSteps
from adiv_monitor.step.rank_contribution import (
    RULE_TOLERANCE,
    RankContribution,
    add_parameters,
    misdescribed,
)
from adiv_monitor.step.run_history import RunHistory
from adiv_monitor.step.transfer import fetch
from adiv_monitor.step.unsharded import WHY_NOT, UnshardedParameters, spread
from adiv_monitor.step.vectors import Change, losing
from adiv_monitor.step.whole_model import WholeModel

if TYPE_CHECKING:
    from adiv_monitor.step.probing import ProbeStep

_OWN = "The measure '{}' is NaN in {{}}: {}."
_SKIPPED = "The optimizer skipped the step, because a gradient is not finite: not measured."
_GRADIENT_LOST = (
    "The optimizer changed .grad during its step, unlike before: parameter_cosine, applied_cosine "
    "and descent of {} are not known; from the next report on they are."
)
_UPDATE_LOST = (
    "The weights changed after the optimizer's step, unlike before: projection_cosine and "
    "applied_cosine of {} are not known; from the next report on they are."
)


@dataclass(eq=False)
class MeasuredStep:
    """Follows one step through its gradient, the optimizer's update and the applied change.

    Attributes:
        capture: the rows; its hooks stay on until the step is taken, since the step may raise.
        history: the habits that this run has shown so far.
        fail: called with a layer's path and the exception that measuring it raised.
        generator: the monitor's own random numbers.
        probe: measures on the probe what was requested; None: nothing was.
        unsharded: gathers gradients and updates of sharded parameters.
        whole: follows the whole model.
        own: measures of the user's own, by name.
        refused: why the step can't be measured; "": it can.
    """

    capture: Capture
    history: RunHistory
    fail: Callable[[str, Exception], None]
    generator: np.random.Generator
    probe: "ProbeStep | None"
    unsharded: UnshardedParameters
    whole: WholeModel
    own: Mapping[str, OwnMeasure] = field(default_factory=dict)
    refused: str = ""
    _unreached: dict[str, str] = field(default_factory=dict)
    _steps: ParameterSteps | None = None

    def __post_init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._layers = FinalGradient(self.generator, tuple(self.own))

    @torch.no_grad()
    def gradient_is_final(self, optimizer: Optimizer | None) -> None:
        """Compute e, and copy the parameters: the gradients are those that the optimizer will use.

        Args:
            optimizer: the optimizer that is about to step; None: no step follows.
        """
        steps = optimizer is not None
        # A fused optimizer divides AMP gradients by the scale itself, or finds inf and skips the
        # step; the scaler leaves both here.
        scale, skipped = (getattr(optimizer, name, None) for name in ("grad_scale", "found_inf"))
        scale = scale if isinstance(scale, Tensor) else None
        self._reset()  # an earlier attempt at this step may have raised
        self._unreached.clear()
        found = self._layers
        found.out.flags["skipped"] = [skipped] if isinstance(skipped, Tensor) else []
        reached = self.capture.finish()
        self.whole.gradient_is_final(self.capture, found.out.flags)
        self._unreached |= self.capture.unreached
        try:
            # Of all due parameters: the layers that were reached differ between ranks.
            self.unsharded.gradients(set(map(id, self.capture.selection.due_parameters)))
            pieces = [piece for layer in reached for piece in layer.pieces]
            self._steps = ParameterSteps(
                [*pieces, *self.unsharded.others(pieces)],
                self.history,
                scale=scale,
                new=not self.history.seen.issuperset({layer.path for layer in reached}),
                masters={} if optimizer is None else self.history.masters(optimizer),
            )
            found.start(reached, self._steps, updates=steps)
            unscaled = gradient if scale is None else lambda p: gradient(p) / scale
            self._measure(tuple(reached), found.begin, unscaled)
        finally:
            self.unsharded.settle()
        with _without_autocast(x.G for x in found.measured.values()):
            found.finish(self._lose)
        if steps:
            self._steps.keep_parameters()
        if self.probe is not None:
            self.probe.gradient_is_final(self.capture, updates=steps)
        if not steps:
            self._finish()

    @torch.no_grad()
    def updated(self) -> None:
        """Compute u and d: the optimizer has stepped."""
        found, out = self._layers, self._layers.out
        self.whole.updated(out.flags)
        if self.probe is not None:  # first, while the copies of all parameters still exist
            self.probe.attended()
        if self._steps is None or not (found.measured or self.unsharded.all_participate):
            return
        self._steps.stepped()
        measured = found.measured.items() if self.capture.selection.shards else ()
        apart = {path: x.layer for path, x in measured if spread(x.layer)}
        try:
            self.unsharded.updates()
            self._measure(apart.values(), self._update, self._steps.update_of)
        finally:
            self.unsharded.settle()
        with _without_autocast(x.G for x in found.measured.values()):
            for block in found.blocks:
                block.update(self._change, found.measured.keys() - apart, self._lose)
        self._measure_own()
        self._finish()  # first: the product with γ overwrites the difference
        out.flags["gradient_changed"] = [self._steps.finish_update()]
        if self.probe is not None:
            self.probe.updated(out)

    @torch.no_grad()
    def applied(self) -> None:
        """Compute a, as the next step begins or training ends."""
        if self._steps is not None and "w_w" in self._steps.products:
            differs = self._steps.applied()
            self._layers.out.flags["weights_changed"] = [] if differs is None else [differs]

    def discard(self, why: str) -> None:
        """Drop the step: it can't be measured."""
        self._reset()
        self.refused = why
        if self.probe is not None:
            self.probe.discard()

    @torch.no_grad()
    def contribution(self, number: int) -> RankContribution:
        """Transfer all numbers to the host at once, and return this rank's contribution.

        Args:
            number: number of the step.
        """
        steps, probe, capture, found = self._steps, self.probe, self.capture, self._layers
        found.out.flags |= {
            "loss_gradients": [*capture.passes.losses],
            "zeroed": [*capture.passes.norms],
            "batch": [*capture.watching.batch],
            "next_batch": [*capture.next_batch],
            "probable": [*capture.passes.probable],
            "norm_passes": capture.norm_passes,
            **({} if steps is None else {name: [*of] for name, of in steps.products.items()}),
        }
        sums, flags, attention = fetch(found.out, {} if probe is None else probe.attention())
        errors = dict(zip(sums.paths, sums.layers["rule_error"].tolist(), strict=True))
        self.history.checked_rules |= {p for p, error in errors.items() if error <= RULE_TOLERANCE}
        wrong = misdescribed(errors)
        sums = sums.pick(np.flatnonzero([path not in wrong for path in sums.paths]))
        skipped = _SKIPPED if _is_set(flags, "skipped") else ""
        refused = tuple(why for why in (skipped, self.refused) if why)
        if refused:
            sums = NO_SUMS
        elif steps is not None:
            dots = {name: np.concatenate(of) for name in OF_PARAMETERS if (of := flags.get(name))}
            if "w_w" in dots and sums.paths:
                self.history.seen |= {*sums.paths, *self._unreached, *wrong}
                self._learn(flags, dots, sums.paths)
            add_parameters(sums, dots, found.pieces, steps.keys)
        noted = (note.format(listed(paths)) for note, paths in found.noted.items())
        facts: dict[str, Any] = {
            "notes": (
                *capture.notes(overflowed=not np.isfinite(flags["zeroed"]).all()),
                *noted,
                *([] if probe is None else probe.notes),
            ),
            **self.whole.facts(sums, flags),
            **({} if refused else self._facts(flags)),
        }
        unsupported = {} if refused else {**self._unreached, **wrong}
        part = RankContribution(
            StepReport(number, {}, unsupported, 0.0, **facts),
            sums,
            refused,
            wrong,
            rows_lost=tuple(path for path in found.reached if path not in sums.paths),
        )
        if probe is not None and not refused:
            part.attention = {path: merge(calls) for path, calls in attention.items()}
            part.no_attention = dict(probe.refused)
        return part

    def _learn(
        self, flags: Mapping[str, Sequence[Array]], dots: dict[str, Array], paths: Sequence[str]
    ) -> None:
        """Record the habits that this step showed; make NaN, with a note, what they spoil in it."""
        assert self._steps is not None
        gradient_changed, applied = _is_set(flags, "gradient_changed"), dots.get("a_a")
        # Computed in the same way, they are equal to the last bit unless θ has changed.
        weights_changed = _is_set(flags, "weights_changed") or (
            applied is not None and not np.array_equal(dots["w_w"], applied, equal_nan=True)
        )
        self.history.learn(gradient_changed=gradient_changed, weights_changed=weights_changed)
        lost = dict[str, tuple[str, ...]]()
        if gradient_changed and not self._steps.has_copies:
            lost[_GRADIENT_LOST] = ("w_gamma", "a_gamma", "reached", "changed")
        if weights_changed and applied is None:
            lost[_UPDATE_LOST] = ("a_w", "a_gamma")
        for note, names in lost.items():
            self._layers.noted[note] += paths
            dots |= dict.fromkeys(names, np.full(len(self._steps.keys), np.nan))

    def _facts(self, flags: Mapping[str, Sequence[Array]]) -> dict[str, Any]:
        """Return for the report what was seen of the loss and of batches."""
        capture = self.capture
        given = ([*map(float, flags[name])] for name in ("loss_gradients", "zeroed"))
        gradients, zeroed = capture.passes.told(*given)
        return {
            "probabilities": _is_set(flags, "probable"),
            "loss_shapes": capture.passes.shapes,
            "norm_passes": next(map(int, flags["norm_passes"]), None),
            "zeroed_passes": zeroed,
            "loss_gradients": tuple(gradients),
            "unused_losses": capture.passes.unused,
            "evaluated": capture.evaluated,
            "batch": tuple(float(of[0]) for of in flags["batch"]),
            "batch_spread": tuple(float(of[1]) for of in flags["batch"]),
            "next_batch": tuple(float(of[0]) for of in flags["next_batch"]),
            "realised_loss_change": next(map(float, flags.get("loss_change", ())), None),
            "realised_loss_changes": tuple(*(x.tolist() for x in flags.get("loss_changes", ()))),
        }

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
        self._layers.forget(path)
        if isinstance(error, Refused):
            self._unreached[path] = str(error)
        else:
            self.fail(path, error)

    def _update(self, layer: Layer, parts: Parts) -> None:
        """Compute d of a layer whose update was all-gathered."""
        for block in self._layers.blocks:
            block.update(partial(self._change, parts=parts), (layer.path,), self._lose)

    def _change(self, layer: Layer, parts: Parts | None = None) -> Change:
        """Return the change of a layer's weight and bias; `parts` are its all-gathered pieces."""
        assert self._steps is not None
        change = layer.change({**self._steps.taken, **parts} if parts else self._steps.taken)
        if self.probe is not None:
            self.probe.take(layer.path, change)
        return change

    def _measure_own(self) -> None:
        """Compute the measures of the user's own."""
        found, steps = self._layers, self._steps
        for path, of in found.kept.items():
            values: list[Tensor] = []
            assert steps is not None
            taken = of[0].change(steps.taken)[0]
            assert taken is not None
            now = steps.now(of[0])
            for name, measure in self.own.items():
                value, error = measured(measure, of, taken, now)
                values.append(value)
                if error is not None:
                    why = f"{type(error).__name__}: {error}".partition("\n")[0]
                    found.noted[_OWN.format(name, why)].append(path)
            number, told = np.arange(len(values)), {"value": torch.stack(values)}
            found.out.add("own", [path], told, number=number, rows=len(of[2]))

    def _finish(self) -> None:
        """Finish the sums of all layers, and release their rows."""
        found = self._layers
        with _without_autocast(x.G for x in found.measured.values()):
            for block in found.blocks:
                with losing(block.layers, self._lose):
                    block.send(found.out, self.generator)
        found.measured.clear()
        found.blocks.clear()


@contextmanager
def _without_autocast(tensors: Iterable[Tensor]) -> Iterator[None]:
    with ExitStack() as stack:
        for first in {tensor.device.type: tensor for tensor in tensors}.values():
            stack.enter_context(without_autocast(first))
        yield


def _is_set(flags: Mapping[str, Sequence[Array]], name: str) -> bool:
    return any(of.any() for of in flags.get(name, ()))
