"""`MaxLRScheduler` as a callback of Lightning: translation only."""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from adiv_monitor.alignment.probe import Probe
from adiv_monitor.lightning_base import Callback
from adiv_monitor.max_lr.schedule.scheduler import MaxLRScheduler

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer


class MaxLRCallback(Callback):
    """Runs a `MaxLRScheduler` during `Trainer.fit`, and logs factors as `adiv.max_lr/<layer>`.

    Whatever scheduler `configure_optimizers` returns goes on as it is. Its loss is watched. The
    scheduler's state is part of the Trainer's checkpoints.

    Args:
        probe: see `MaxLRScheduler`; moved to the model's device. None with mode="static".
        options: further arguments of `MaxLRScheduler`.

    Raises:
        ImportError: without Lightning.
        ValueError: when training begins with other than one optimizer, or what `MaxLRScheduler`
            can't work with.

    Attributes:
        scheduler: of the present or last fit; None before the first.
    """

    def __init__(self, probe: Probe | None, **options: Any) -> None:
        self._probe = probe
        self._options = options
        self._restored: dict[str, Any] | None = None
        self.scheduler: MaxLRScheduler | None = None

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's."""
        return {} if self.scheduler is None else self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there in the coming fit."""
        self._restored = state_dict or None

    def on_train_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Optimizers exist, and weights are restored."""
        if len(trainer.optimizers) != 1:
            raise ValueError(
                f"MaxLRCallback: got a fit with {len(trainer.optimizers)} optimizers, expected one"
            )
        probe = None if self._probe is None else self._probe.to(pl_module.device)
        optimizer = trainer.optimizers[0]
        self.scheduler = MaxLRScheduler(optimizer, pl_module, probe, **self._options)
        if self._restored is not None:
            self.scheduler.load_state_dict(self._restored)
            self._restored = None

    def on_train_batch_end(
        self, trainer: "Trainer", pl_module: "LightningModule", outputs: Any, *args: Any
    ) -> None:
        """Watch the loss, and log what there is."""
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

    def on_train_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Leave nothing on the optimizer."""
        self._close()

    def on_exception(
        self, trainer: "Trainer", pl_module: "LightningModule", exception: BaseException
    ) -> None:
        """Nor when the fit fails."""
        self._close()

    def _close(self) -> None:
        if self.scheduler is not None:
            self.scheduler.close()
