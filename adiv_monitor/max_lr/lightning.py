"""`MaxLRScheduler` as a Lightning callback."""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from adiv_monitor.alignment.probe import Probe
from adiv_monitor.lightning_base import Callback
from adiv_monitor.max_lr.schedule.scheduler import MaxLRScheduler

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer


class MaxLRCallback(Callback):
    """Runs a `MaxLRScheduler` during `Trainer.fit`, and logs factors as `adiv.max_lr/<layer>`.

    Schedulers that `configure_optimizers` returns work as before. The training loss is passed to
    `see_loss`. The state of the `MaxLRScheduler` is part of the Trainer's checkpoints.

    Args:
        probe: see `MaxLRScheduler`; moved to the model's device.
        options: further arguments of `MaxLRScheduler`.

    Raises:
        ImportError: without Lightning.
        ValueError: at the start of training, if there is not exactly one optimizer, or if
            `MaxLRScheduler` refuses its arguments.

    Attributes:
        scheduler: scheduler of the current or last fit; None before the first.
    """

    def __init__(self, probe: Probe, **options: Any) -> None:
        self._probe = probe
        self._options = options
        self._restored: dict[str, Any] | None = None
        self.scheduler: MaxLRScheduler | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state."""
        return {} if self.scheduler is None else self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from this state in the next fit."""
        self._restored = state_dict or None

    def on_train_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Create the scheduler: optimizers exist now, and weights are restored."""
        if len(trainer.optimizers) != 1:
            raise ValueError(
                f"MaxLRCallback: got a fit with {len(trainer.optimizers)} optimizers, expected one"
            )
        probe = self._probe.to(pl_module.device)
        self.scheduler = MaxLRScheduler(trainer.optimizers[0], pl_module, probe, **self._options)
        if self._restored is not None:
            self.scheduler.load_state_dict(self._restored)
            self._restored = None

    def on_train_batch_end(
        self, trainer: "Trainer", pl_module: "LightningModule", outputs: Any, *args: Any
    ) -> None:
        """Pass the loss on, and log new factors."""
        if self.scheduler is None:
            return
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor):
            self.scheduler.see_loss(loss)
        latest = self.scheduler.latest
        if latest is not None and latest.step == self.scheduler.step:
            shown = {f"adiv.max_lr/{path}": m for path, m in self.scheduler.proposed.items()}
            for logger in trainer.loggers:
                logger.log_metrics(shown, step=trainer.global_step)

    def on_train_end(self, *args: Any) -> None:
        """Remove all hooks from the optimizer."""
        if self.scheduler is not None:
            self.scheduler.close()

    def on_exception(self, *args: Any) -> None:
        """Remove all hooks from the optimizer if the fit fails."""
        self.on_train_end()
