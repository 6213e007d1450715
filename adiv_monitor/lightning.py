"""The monitor as a Lightning callback: translation only.

One class serves the Trainers of `pytorch_lightning` and of `lightning.pytorch`: the two packages
hold equal but different base classes.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from adiv_monitor.callback_monitor import CallbackMonitor, CallbackOptions, Settings
from adiv_monitor.capture.loss_hook import torchs_loss
from adiv_monitor.capture.selection import LayerChoice, is_chosen, named_modules
from adiv_monitor.lightning_base import Callback
from adiv_monitor.report import WORST, StepReport
from adiv_monitor.sinks import Sink
from adiv_monitor.sinks.board import BoardSink
from adiv_monitor.sinks.logger import logger_sinks
from adiv_monitor.sinks.scalars import Metrics, summary_group

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer
    from typing_extensions import Unpack

    from adiv_monitor.alignment.probe import Probe


_NAME = "optimizer_"


class DivergenceCallback(Callback):
    """Monitors the optimizers of a `Trainer.fit` and writes to all loggers of the Trainer.

    A TensorBoard logger receives pictures, findings and scalars (see `TensorBoardSink`). Any other
    logger, such as those of W&B, MLflow and Comet, receives the scalars through `log_metrics`; in
    W&B, pictures and findings are beside them (see `TrackerSink`).

    The summary over layers is also in `trainer.callback_metrics`, for early stopping and
    checkpoints, for example as `adiv.summary/update_cosine_min` (`MeasureSummary` says how it uses
    standard errors). A report is there once the next batch or a validation has run, because until
    then code may still change the weights; the first report of a fit is there when the first epoch
    ends. Until then, and for a measure without a direction, the value is None: a checkpoint saves
    nothing for it, and early stopping treats it as missing, which needs `strict=False`.

    `StepReport.losses` has the loss that `training_step` returns, without Lightning's division by
    `accumulate_grad_batches`. It has no loss if an optimizer evaluates its closure several times
    (LBFGS), or if manual optimization takes several steps in a batch, because then it is not known
    to which step a loss belongs. Of a single optimizer and one loss of torch's own in the module
    (`self.loss = nn.CrossEntropyLoss()`), it knows what the loss gets, as `Monitor(loss=…)` does.

    With several optimizers, each has its own monitor and its own count of steps; their summaries
    are named `adiv.summary.optimizer_0/…`, `adiv.summary.optimizer_1/…`.

    Args:
        every_n_steps: the callback measures the optimizer steps whose number is a multiple of this.
            None: of `Trainer(log_every_n_steps=…)`, or more rarely, as `max_overhead` asks.
        alignment: the batch on which alignments are measured, as in `Monitor`.
        prog_bar: show the worst value of the first measure in the progress bar.
        **options: those of `CallbackOptions`. With `on_alarm="stop"`, `trainer.should_stop` is set
            in all ranks at the same batch, once the loggers have a report with alarms, and one line
            of the logger `adiv_monitor` says why. The Trainer first completes `min_epochs` and
            `min_steps`.

    Raises:
        ImportError: Lightning is not installed.
        TypeError: a sink is not a sink, or there is no such option.
        ValueError: there is no measure of that name. When the fit begins: there is nowhere to write
            to, no interval, no optimizer, or no such layer.

    Warns:
        UserWarning: every logger takes numbers only, and there are no other sinks.

    Attributes:
        monitors: the monitors of the current or last fit, by name of the optimizer ("" if there is
            one).
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        *,
        alignment: "Probe | None" = None,
        prog_bar: bool = False,
        **options: "Unpack[CallbackOptions]",
    ) -> None:
        self._every_n_steps = every_n_steps
        self._settings = Settings.of("DivergenceCallback", options, every_n_steps)
        self._arguments = {**self._settings.monitor, "alignment": alignment}
        self._prog_bar = prog_bar
        self._restored: dict[str, Any] = {}
        self._published: dict[str, StepReport] = {}
        self._begun: dict[str, int] = {}  # steps taken when the batch began
        self._backwards = 0  # in the batch
        self.monitors: dict[str, CallbackMonitor] = {}

    @property
    def state_key(self) -> str:
        """The key of the state in a checkpoint; it depends on the layers that are measured."""
        # A predicate's own repr holds an address, which the next process would not find again.
        layers = self._settings.layers
        named = getattr(layers, "__qualname__", type(layers).__name__)
        return self._generate_state_key(layers=named if callable(layers) else layers)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each monitor, by name of the optimizer."""
        return {name: monitor.state_dict() for name, monitor in self.monitors.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state for the monitors of the next fit."""
        self._restored = state_dict

    def setup(self, trainer: "Trainer", pl_module: "LightningModule", stage: str) -> None:
        """Raise if the Trainer has nowhere to write to, before it does any work."""
        if stage != "fit":
            return
        if not trainer.loggers and not self._settings.sinks:
            raise ValueError(
                "DivergenceCallback: got a Trainer without a logger, expected one, or sinks of "
                "yours: DivergenceCallback(sinks=[JsonlSink('run.jsonl')])"
            )
        if self._every_n_steps is None and not self._interval(trainer):
            raise ValueError(
                "DivergenceCallback: every_n_steps=None follows Trainer(log_every_n_steps=0), "
                "so it would never measure; expected DivergenceCallback(every_n_steps=1) or more"
            )

    def on_train_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Create and attach the monitors: optimizers exist and checkpoints are restored by now."""
        # A further fit of the same Trainer goes on counting, too.
        counts = (self._restored or self.state_dict()) if trainer.global_step else {}
        self._restored = {}
        self._published = {}
        self.monitors = self._make_monitors(trainer, pl_module)
        for name, monitor in self.monitors.items():
            if name in counts:
                monitor.load_state_dict(counts[name])
            elif len(trainer.optimizers) == 1:
                monitor.step = trainer.global_step
            monitor.attach()
        self._announce(trainer)

    def on_train_batch_start(
        self, trainer: "Trainer", pl_module: "LightningModule", *args: Any
    ) -> None:
        """Store the number of the step to which the batch belongs."""
        self._begun = {name: monitor.step for name, monitor in self.monitors.items()}
        self._backwards = 0

    def on_before_backward(
        self, trainer: "Trainer", pl_module: "LightningModule", loss: torch.Tensor
    ) -> None:
        """Count the backward passes of the batch."""
        self._backwards += 1

    def on_train_batch_end(
        self, trainer: "Trainer", pl_module: "LightningModule", outputs: Any, *args: Any
    ) -> None:
        """Publish complete reports for early stopping, checkpoints and the progress bar."""
        self._log_loss(trainer, pl_module, outputs)
        self._publish(trainer)

    def on_validation_epoch_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Publish the report of the step before the validation."""
        for monitor in self.monitors.values():
            monitor.complete_report()
        self._publish(trainer)

    def on_train_epoch_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Publish a report even if the epoch has a single step."""
        for name, monitor in self.monitors.items():
            if name not in self._published:
                monitor.complete_report()
        self._publish(trainer)

    def on_train_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Complete the last report while the loggers are open."""
        self._close()
        self._publish(trainer)

    def on_exception(
        self, trainer: "Trainer", pl_module: "LightningModule", exception: BaseException
    ) -> None:
        """Remove the monitors if the fit fails."""
        self._close()

    def teardown(self, trainer: "Trainer", pl_module: "LightningModule", stage: str) -> None:
        """Remove the monitors, however the fit ended."""
        self._close()

    def _log_loss(self, trainer: "Trainer", pl_module: "LightningModule", outputs: Any) -> None:
        """Log the batch's loss, if the step to which it belongs is known."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if not isinstance(loss, torch.Tensor) or not loss.numel():
            return
        if pl_module.automatic_optimization:
            if self._backwards != 1:
                return
            loss = loss * trainer.accumulate_grad_batches
        steps = {name: monitor.step - self._begun[name] for name, monitor in self.monitors.items()}
        if len(trainer.optimizers) > 1:  # an optimizer without a monitor may have stepped, too
            steps = {name: count for name, count in steps.items() if count}
            if len(self.monitors) < len(trainer.optimizers) or len(steps) != 1:
                return
        for name, count in steps.items():
            if count <= 1:
                self.monitors[name].log_loss(loss, self._begun[name])

    def _interval(self, trainer: "Trainer") -> int:
        given = self._every_n_steps
        follow: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by a connector
        return follow if given is None else given

    def _make_monitors(
        self, trainer: "Trainer", pl_module: "LightningModule"
    ) -> dict[str, CallbackMonitor]:
        if not trainer.optimizers:
            raise ValueError(
                "DivergenceCallback: got a Trainer without optimizers, expected at least one"
            )
        choices: dict[str, LayerChoice] = {"": self._settings.layers}
        loss = None if self._arguments["realised"] else _loss_of(pl_module)
        if len(trainer.optimizers) > 1:
            loss, choices = None, _shares(pl_module, trainer.optimizers, self._settings.layers)
        return {
            name: CallbackMonitor(
                pl_module,
                trainer.optimizers[int(name.removeprefix(_NAME) or 0)],
                every_n_steps=self._interval(trainer),
                layers=choice,
                sinks=self._all_sinks(trainer, name),
                name=name,
                loss=loss,
                **self._arguments,
            )
            for name, choice in choices.items()
        }

    def _all_sinks(self, trainer: "Trainer", name: str) -> list[Sink]:
        if not trainer.is_global_zero:
            return []
        metrics = self._metrics(name)
        loggers = [sink for logger in trainer.loggers for sink in logger_sinks(logger, metrics)]
        given = self._settings.sinks
        if not (given or trainer.fast_dev_run or any(isinstance(x, BoardSink) for x in loggers)):  # type: ignore[attr-defined]
            kinds = ", ".join(type(logger).__name__ for logger in trainer.loggers)
            warnings.warn(
                f"DivergenceCallback: {kinds} takes numbers only; for findings and heat maps pass "
                "DivergenceCallback(sinks=[HtmlSink('run.html')])",
                stacklevel=2,
            )
        return [*loggers, *(sink.of(name) for sink in given)]

    def _announce(self, trainer: "Trainer") -> None:
        """Set metrics to None, which a checkpoint skips; it refuses metrics that do not exist."""
        for name in self.monitors:
            for metric in self._metrics(name).to_follow(self._arguments):
                trainer.callback_metrics.setdefault(metric, None)  # type: ignore[arg-type]

    def _metrics(self, name: str) -> Metrics:
        """Return the metrics that are logged for one of the monitors."""
        return replace(self._settings.metrics, name=name)

    def _publish(self, trainer: "Trainer") -> None:
        """Write the summaries of new reports to the metrics of callbacks and progress bar."""
        first = self._settings.metrics.followed[0]
        shown = f"{first}_{WORST.get(first, 'max')}"
        for name, monitor in self.monitors.items():
            report = monitor.completed
            if report is None or report is self._published.get(name):
                continue
            self._published[name] = report
            metrics = self._metrics(name)
            summary = metrics.summary(report)
            if self._arguments["alarms"]:  # not the number of an earlier report
                summary.setdefault(f"{summary_group(name)}/alarms", 0.0)
            trainer.callback_metrics.update(
                {metric: torch.tensor(v) for metric, v in metrics.named(summary).items()}
            )
            for tag, value in summary.items():
                short = tag.rpartition("/")[2]
                if self._prog_bar and short == shown:
                    trainer.progress_bar_metrics[f"{name} {short}".strip()] = value
        if any(monitor.alarmed for monitor in self.monitors.values()):
            trainer.should_stop = True

    def _close(self) -> None:
        for monitor in self.monitors.values():
            monitor.close()


def _loss_of(model: nn.Module) -> nn.Module | None:
    """Return the one module of torch's own losses in a model; None: there is none, or several."""
    found = [module for module in model.modules() if torchs_loss(module)]
    return found[0] if len(found) == 1 else None


def _shares(
    model: nn.Module, optimizers: Sequence[Optimizer], layers: LayerChoice
) -> dict[str, LayerChoice]:
    """Return the chosen layers of each optimizer, by its name; without optimizers that have none.

    The first optimizer also gets the layers that no optimizer holds; its report lists them.
    """
    held = [{id(p) for group in o.param_groups for p in group["params"]} for o in optimizers]
    anyones = set().union(*held)

    def share(index: int) -> Callable[[str, nn.Module], bool]:
        def answers_for(path: str, module: nn.Module) -> bool:
            own = {id(p) for p in module.parameters(recurse=False) if p.requires_grad}
            mine = own & held[index] or (index == 0 and own - anyones)
            return bool(mine) and is_chosen(path, module, layers)

        return answers_for

    shares = {f"{_NAME}{index}": share(index) for index in range(len(optimizers))}
    modules = list(named_modules(model))
    filled = [name for name, choice in shares.items() if any(choice(*m) for m in modules)]
    if not filled:
        return {"": layers}  # Monitor refuses it, and lists the layers that exist
    return {name: shares[name] for name in filled}
