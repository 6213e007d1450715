"""A step to be measured, with its hooks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from adiv_monitor.capture.capture import Capture
from adiv_monitor.capture.coverage import coverage_of
from adiv_monitor.capture.guard import Guard, call_all
from adiv_monitor.capture.hook import GlobalHooks, trains
from adiv_monitor.capture.loss_hook import LossHook
from adiv_monitor.capture.selection import Selection
from adiv_monitor.report import Turn
from adiv_monitor.rerun.eager import forced_eager
from adiv_monitor.rerun.surroundings import reruns
from adiv_monitor.rerun.thread import surely
from adiv_monitor.step.failures import Failures
from adiv_monitor.step.measured_step import MeasuredStep
from adiv_monitor.step.rank_contribution import RankContribution
from adiv_monitor.step.stepping import NO_RATES, Others, Rates
from adiv_monitor.step.transfer import fetch_numbers

if TYPE_CHECKING:
    from adiv_monitor.step.probing import ProbeStep


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
        attempts: number of optimizer steps so far: one that raises may be repeated.
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
    rates: Rates = NO_RATES
    attempts: int = 0
    closure_calls: int | None = None
    told: dict[str, Any] = field(default_factory=dict)
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
        surely(call_all, *reversed(self._off))
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
            hook = hooked.register_post_accumulate_grad_hook(self.step.whole.comes_late)
            self._off.append(hook.remove)

    def _ran(self, module: nn.Module, args: Any, *more: Any) -> None:
        if (
            module is not self.capture.watching.first
            or not more[1:]
            or reruns()
            or not trains(args)
        ):
            return
        if module.training and torch.is_grad_enabled():
            self.guard(self.capture.next_ran, args, more[0])
            self.release()

    def parameters(self, paths: Sequence[str]) -> dict[str, list[int]]:
        """Return the ids of the parameters of layers that were measured."""
        found = self.capture.layers.found
        return {path: [id(of.parameter) for of in found[path].pieces] for path in paths}

    def describe(self, part: RankContribution, failures: Failures, interval: int) -> None:
        """Fill in which parameters a contribution covers, and why it does not cover others."""
        seen, rates, off = self.capture.layers.found, self.rates, failures.switched_off
        covered = coverage_of(
            part.sums.paths,
            self.selection,
            self.capture,
            told=part.report.unsupported,
            off=off,
            is_measured=not part.refused,
        )
        learning_rates = tuple(fetch_numbers(rates.of_groups))
        group_of = rates.groups if len(set(learning_rates)) > 1 else {}
        firsts = {path: id(seen[path].pieces[0].parameter) for path in part.sums.paths}
        part.elements = covered.elements
        part.rows_lost = (*part.rows_lost, *off)
        part.report = replace(
            part.report,
            unsupported=covered.unsupported,
            coverage=covered.share,
            notes=(*failures.notes, *part.report.notes),
            unmeasured=covered.unmeasured,
            interval=interval,
            turn=self.turn,
            learning_rates=learning_rates,
            groups={path: group_of[key] for path, key in firsts.items() if key in group_of},
            **rates.told,
            **self.told,
            other_optimizers=tuple(self.others.writes),
            changed_by=tuple(+self.others.writes),
        )
        failures.notes.clear()
