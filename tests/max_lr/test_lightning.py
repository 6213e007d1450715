"""The callback takes the same steps as the scheduler by hand, and saves state in checkpoints."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.optim import lr_scheduler

pytest.importorskip("scipy")
pytest.importorskip("pytorch_lightning")
import pytorch_lightning as pl
from lightning_setups import trainer

from adiv_monitor.alignment import Probe
from adiv_monitor.max_lr import MaxLRScheduler
from adiv_monitor.max_lr.lightning import MaxLRCallback

PROBE = Probe(torch.randn(16, 20, generator=torch.Generator().manual_seed(9)))
OPTIONS: dict[str, Any] = {"mode": "dynamic", "every_n_steps": 2, "warm_up": 2}
STEPS = 12


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = optim.Adam(self.parameters(), lr=1e-3)
        return [optimizer], [
            {"scheduler": lr_scheduler.CosineAnnealingLR(optimizer, 20), "interval": "step"}
        ]


def loader() -> Any:
    x = torch.randn(8 * STEPS // 2, 20, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, x[:, :5].argmax(1)), batch_size=8
    )


@pytest.mark.filterwarnings("ignore")  # Lightning's advice
def test_a_fit_is_the_loop_by_hand_and_resumes(tmp_path: Path) -> None:
    by_hand = Module()
    (optimizer,), (other,) = by_hand.configure_optimizers()
    scheduler = MaxLRScheduler(optimizer, by_hand, PROBE, **OPTIONS)
    for x, y in [*loader(), *loader()]:
        optimizer.zero_grad()
        loss = by_hand.training_step([x, y], 0)
        loss.backward()
        optimizer.step()
        scheduler.see_loss(loss)
        other["scheduler"].step()

    whole, callback = Module(), MaxLRCallback(PROBE, **OPTIONS)
    run = partial(trainer, default_root_dir=tmp_path)
    run(callbacks=callback, max_epochs=2).fit(whole, loader())
    assert callback.scheduler.gains == scheduler.gains != dict.fromkeys(scheduler.gains, 1.0)
    assert all(map(torch.equal, whole.state_dict().values(), by_hand.state_dict().values()))

    half = MaxLRCallback(PROBE, **OPTIONS)
    first = run(callbacks=half)
    first.fit(Module(), loader())
    first.save_checkpoint(tmp_path / "half.ckpt")
    resumed, rest = Module(), MaxLRCallback(PROBE, **OPTIONS)
    second = run(callbacks=rest, max_epochs=2)
    second.fit(resumed, loader(), ckpt_path=tmp_path / "half.ckpt", weights_only=False)
    assert rest.scheduler.step == callback.scheduler.step
    assert half.scheduler.step == STEPS // 2
    assert half.scheduler.gains != rest.scheduler.gains == callback.scheduler.gains
    assert all(map(torch.equal, whole.state_dict().values(), resumed.state_dict().values()))
    assert not second.optimizers[0]._optimizer_step_pre_hooks


@pytest.mark.filterwarnings("ignore")
def test_one_optimizer_is_expected(tmp_path: Path) -> None:
    class Two(Module):
        def configure_optimizers(self) -> Any:
            self.automatic_optimization = False
            return [optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]

    with pytest.raises(ValueError, match="2 optimizers"):
        trainer(callbacks=MaxLRCallback(PROBE), default_root_dir=tmp_path).fit(Two(), loader())
