"""A step to be measured, with its hooks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from adiv_monitor.capture.batch import OUTPUTS
from adiv_monitor.capture.capture import Capture
from adiv_monitor.capture.coverage import coverage_of
from adiv_monitor.capture.guard import Guard, call_all
from adiv_monitor.capture.hook import GlobalHooks, trains
from adiv_monitor.capture.loss_hook import LossHook
from adiv_monitor.capture.selection import Selection, listed
from adiv_monitor.maths.sums import NO_SUMS, OF_PARAMETERS, Array, StepSums
from adiv_monitor.report import StepReport, Turn
from adiv_monitor.rerun.eager import forced_eager
from adiv_monitor.rerun.surroundings import reruns
from adiv_monitor.step.failures import Failures
from adiv_monitor.step.measured_step import MeasuredStep
from adiv_monitor.step.messages import RankContribution
from adiv_monitor.step.parameter_steps import add_parameters
from adiv_monitor.step.stepping import Others, Rates
from adiv_monitor.step.transfer import Flags, HostFlags, fetch, fetch_numbers

if TYPE_CHECKING:
    from adiv_monitor.step.probing import ProbeStep

# The error of a rule that does not describe its layer is far above half precision's rounding.
RULE_TOLERANCE = 0.05
_WRONG = (
    "its output differs from that of its rule (relative error {:.2g}): a hook or a subclass "
    "changes it, or the registered rule is wrong"
)
_SKIPPED = "The optimizer skipped the step, because a gradient is not finite: not measured."
_CHANGED = (
    "The optimizer changed .grad during its step, or the weights changed after it, unlike before: "
    "parameter_cosine, projection_cosine, applied_cosine and descent of {} are not known; from the "
    "next report on they are."
)


@dataclass(eq=False)
class Armed:
    """A step to be measured.

    Attributes:
        number: its number.
        capture: captures its rows.
        step: computes its sums.
        selection: the parameters to measure; after the step, as it left them.
        turn: the turn, if layers are measured in turn.
        guard: records whether watching it has failed.
        others: follows the steps of other optimizers.
        hooks: other hooks on its forward passes.
        rates: the optimizer's learning rates.
        told: further facts for the report, by field.
        closure_calls: number of calls during the last attempt; None: without a closure.
    """

    number: int
    capture: Capture
    step: MeasuredStep
    selection: Selection
    turn: Turn | None
    guard: Guard
    others: Others
    hooks: "Sequence[ProbeStep | LossHook]"
    rates: Rates = field(default_factory=lambda: Rates((), {}, {}))
    closure_calls: int | None = None
    told: dict[str, Any] = field(default_factory=dict)
    _late: list[Tensor] = field(default_factory=list, init=False)  # got a gradient after the step
    _off: list[Callable[[], object]] = field(default_factory=list, init=False)  # may be repeated

    def attach(self) -> None:
        """Put the hooks on; call `release` afterwards, even if this raises."""
        eager = forced_eager()
        hooks: list[tuple[Callable[[], object], Callable[[], object]]] = [
            (eager.__enter__, eager.__exit__),
            (partial(self.others.follow, self._drop), self.others.leave),
            *((hook.put_on, hook.remove) for hook in self.hooks),
            (self.capture.attach, self.capture.detach),
        ]
        for on, off in hooks:
            self._off.append(off)
            on()

    def release(self) -> None:
        """Take everything off; after an interrupt, this can be called again."""
        call_all(*reversed(self._off))
        self._off.clear()

    def _drop(self) -> None:
        self.guard.broken = True
        self.release()

    def await_batch(self) -> None:
        """Look at the batch of the next training forward pass; see `StepReport.next_batch`."""
        if self.capture.watching.first is not None:
            hooks = GlobalHooks(None, self._ran)
            self._off.append(hooks.remove)
            hooks.put_on()

    def await_gradient(self) -> None:
        """If the step had no gradient at all, look whether the backward pass comes after it."""
        without = self.capture.without_gradient or set()
        late = [p for p in self.selection.parameters if p.requires_grad and id(p) in without]
        if late and len(without) == len(self.selection.parameters):
            hooked: Any = late[-1]
            hook = hooked.register_post_accumulate_grad_hook(self._late.append)
            self._off.append(hook.remove)

    def _ran(self, module: nn.Module, args: Any, *more: Any) -> None:
        # In another thread, torch calls a hook that is just being removed without `kwargs`.
        is_next = module is self.capture.watching.first and more[1:] and not reruns()
        if is_next and trains(args) and module.training and torch.is_grad_enabled():
            self.guard(self.capture.next_ran, args, more[0])
            self.release()

    # --- the contribution to the report -----------------------------------------------------------

    def contribution(self, failures: Failures, interval: int) -> RankContribution:
        """Transfer all numbers to the host at once, and return this rank's contribution.

        Args:
            failures: tells which layers are off, and has notes, which are taken.
            interval: present number of steps from one measured step to the next.
        """
        step, capture, probe, rates = self.step, self.capture, self.step.probe, self.rates
        step.out.flags |= self._flags()
        sums, flags, attention = fetch(step.out, {} if probe is None else probe.attention())
        sums, wrong = self._described(sums)
        failures.switched_off |= wrong
        for path, why in wrong.items():
            failures.warn(path, f"adiv_monitor: layer '{path}' is not measured: {why}")
        skipped = _SKIPPED if _is_set(flags, "skipped") else ""
        refused = tuple(why for why in (skipped, step.refused) if why)
        if refused:
            sums = NO_SUMS
        elif step.steps is not None:
            dots = {name: np.concatenate(of) for name in OF_PARAMETERS if (of := flags.get(name))}
            if "w_w" in dots and sums.paths:
                step.history.seen |= {*sums.paths, *capture.unreached, *wrong}
                self._learn(flags, dots, sums.paths)
            add_parameters(sums, dots, step.pieces, step.steps.keys)
        covered = coverage_of(
            sums.paths,
            self.selection,
            capture,
            told={} if refused else {**capture.unreached, **wrong},
            off=failures.switched_off,
            is_measured=not refused,
        )
        learning_rates = tuple(fetch_numbers(rates.of_groups))
        group_of = rates.groups if len(set(learning_rates)) > 1 else {}
        found = capture.layers.found
        # One group's number is that of all; else a layer is in the group of its largest parameter.
        largest = {path: max((x.parameter for x in found[path].pieces), key=Tensor.numel)
                   for path in sums.paths if group_of}  # fmt: skip
        report = StepReport(
            self.number,
            {},
            covered.unsupported,
            covered.share,
            notes=self._notes(failures, flags),
            unmeasured=covered.unmeasured,
            interval=interval,
            turn=self.turn and replace(self.turn, elements=covered.elements),
            learning_rates=learning_rates,
            groups={path: group_of[id(p)] for path, p in largest.items() if id(p) in group_of},
            other_optimizers=tuple(self.others.writes),
            changed_by=tuple(+self.others.writes),
            **{**rates.told, **self.told, **self._facts(sums, flags, is_refused=bool(refused))},
        )
        lost = [path for path in step.reached if path not in sums.paths]
        part = RankContribution(report, sums, refused, (*lost, *failures.switched_off))
        if probe is not None and not refused:
            part.attention = attention
            part.no_attention = dict(probe.refused)
        return part

    def _described(self, sums: StepSums) -> tuple[StepSums, dict[str, str]]:
        """Return the sums of layers that their rules describe, and why others are left out."""
        errors = dict(zip(sums.paths, sums.layers["rule_error"].tolist(), strict=True))
        wrong = {p: _WRONG.format(error) for p, error in errors.items() if error > RULE_TOLERANCE}
        self.step.history.checked_rules |= {p for p, e in errors.items() if e <= RULE_TOLERANCE}
        return sums.pick(np.flatnonzero([path not in wrong for path in sums.paths])), wrong

    def _notes(self, failures: Failures, flags: HostFlags) -> tuple[str, ...]:
        """Return the notes of the step, those of failures too, which are taken."""
        before, probe = [*failures.notes], self.step.probe
        failures.notes.clear()
        return (
            *before,
            *self.capture.notes(),
            *(note.format(listed(paths)) for note, paths in self.step.noted.items()),
            *([] if probe is None else probe.notes),
        )

    def _flags(self) -> Flags:
        """Return the numbers of the step as a whole that its capture has."""
        capture, steps = self.capture, self.step.steps
        return {
            "loss_gradients": [*capture.passes.losses],
            "zeroed": [found.norm for found in capture.passes.zeroed],
            "batch": [*capture.watching.batch],
            "next_batch": [*capture.next_batch],
            **capture.passes.given,
            "norm_passes": capture.norm_passes,
            **({} if steps is None else {name: [*of] for name, of in steps.products.items()}),
        }

    def _learn(self, flags: HostFlags, dots: dict[str, Array], paths: Sequence[str]) -> None:
        """Record the habits that this step showed; make NaN, with a note, what they spoil in it."""
        w_w, applied = dots["w_w"], dots.get("a_a")
        # Computed in the same way, they are equal to the last bit unless θ has changed.
        is_other = applied is not None and not np.array_equal(w_w, applied, equal_nan=True)
        changed = is_other or _is_set(flags, "wrote")
        self.step.history.changes |= changed
        if changed and applied is None:  # nothing was kept
            self.step.noted[_CHANGED] += paths
            names = ("w_gamma", "a_w", "a_gamma", "reached", "changed")
            dots |= dict.fromkeys(names, np.full(len(w_w), np.nan))

    def _facts(self, sums: StepSums, flags: HostFlags, *, is_refused: bool) -> dict[str, Any]:
        """Return for the report what was seen of the whole model, of the loss and of batches."""
        capture = self.capture
        found = self.step.whole.facts(capture, sums, flags, comes_late=bool(self._late))
        if is_refused:
            return found
        given = ([*map(float, flags[name])] for name in ("loss_gradients", "zeroed"))
        gradients, zeroed = capture.passes.told(*given)
        kinds = (kind for of in flags.get("outputs", ()) for kind in compress(OUTPUTS, of))
        labels = tuple(int(x) for of in flags.get("labels", ()) for x in of)
        return found | {
            "outputs": next(kinds, ""),
            "labels": labels if any(labels) else (),
            "target_moments": tuple(float(x) for of in flags.get("target_moments", ()) for x in of),
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
        }


def _is_set(flags: HostFlags, name: str) -> bool:
    return any(of.any() for of in flags.get(name, ()))
