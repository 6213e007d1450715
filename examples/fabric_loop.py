"""Lightning Fabric: a small CNN distinguishes vertical from horizontal bars, in bfloat16.

The monitor receives the objects that `fabric.setup` returned; layers have the same names as without
Fabric. The example needs the package lightning.

    python examples/fabric_loop.py
"""

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from adiv_monitor import Monitor
from adiv_monitor.sinks import TableSink

STEPS, ROWS, SIDE = 120, 32, 12


def bars(rows: int) -> tuple[Tensor, Tensor]:
    """Return noisy images (rows, 1, SIDE, SIDE) with one bright column or row, and its kind."""
    images = 0.5 * torch.randn(rows, 1, SIDE, SIDE)
    images[torch.arange(rows), :, :, torch.randint(SIDE, (rows,))] += 1
    lying = torch.randint(2, (rows,))
    turned = torch.where(lying[:, None, None, None] == 1, images.transpose(2, 3), images)
    return turned, lying


def main() -> None:
    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3),
        nn.ReLU(),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 2),
    )
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.05))
    loss_of, sinks = nn.CrossEntropyLoss(), [TableSink()]
    with Monitor(model, optimizer, every_n_steps=40, loss=loss_of, sinks=sinks) as monitor:
        for _ in range(STEPS):
            images, lying = bars(ROWS)
            optimizer.zero_grad()
            loss = loss_of(model(images), lying)
            fabric.backward(loss)
            optimizer.step()
    fabric.print(f"Loss {loss.item():.3f} after {monitor.step} steps")


if __name__ == "__main__":
    main()
