"""Accelerate: a network learns addition modulo 23, with gradient accumulation.

The monitor receives the objects that `accelerator.prepare` returned. Its steps are those of the
optimizer, here after every fourth batch and after the last one of an epoch. The rows of a step are
those of all its batches.

    python examples/accelerate_loop.py
    accelerate launch --mixed_precision bf16 examples/accelerate_loop.py
"""

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from adiv_monitor import Monitor
from adiv_monitor.sinks import TableSink

MODULUS = 23


class Adder(nn.Module):
    """A network that scores every sum of two numbers modulo MODULUS."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(MODULUS, 32)
        self.norm = nn.LayerNorm(64)
        self.hidden = nn.Linear(64, 128)
        self.output = nn.Linear(128, MODULUS)

    def forward(self, numbers: Tensor) -> Tensor:
        """Map numbers (rows, 2) to scores (rows, MODULUS)."""
        x = self.norm(self.embed(numbers).flatten(1))
        return self.output(torch.relu(self.hidden(x)))


def main() -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=4)
    pairs = torch.cartesian_prod(torch.arange(MODULUS), torch.arange(MODULUS))
    data = TensorDataset(pairs, pairs.sum(dim=1) % MODULUS)
    model = Adder()
    model, optimizer, loader = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        DataLoader(data, batch_size=16, shuffle=True, drop_last=True),
    )
    with Monitor(model, optimizer, every_n_steps=80, sinks=[TableSink()]) as monitor:
        for _ in range(40):
            for numbers, total in loader:
                with accelerator.accumulate(model):
                    loss = nn.functional.cross_entropy(model(numbers), total)
                    accelerator.backward(loss)
                    monitor.log_loss(loss)
                    optimizer.step()
                    optimizer.zero_grad()
    accelerator.print(f"Loss {loss.item():.3f} after {monitor.step} steps")


if __name__ == "__main__":
    main()
