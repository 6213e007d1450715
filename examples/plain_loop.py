"""A plain training loop: a small network classifies points of two spirals.

It prints a table every 100 steps, and writes every report to a file. As the network learns, the
scale of the last layer grows, and few of its rows are harmed.

    python examples/plain_loop.py
"""

import torch
from torch import Tensor, nn

from adiv_monitor import Monitor
from adiv_monitor.sinks import JsonlSink, TableSink

STEPS, ROWS = 300, 64


def spirals(rows: int) -> tuple[Tensor, Tensor]:
    """Return points (rows, 2) on two arms that wind around each other, and each point's arm."""
    arm = torch.randint(2, (rows,))
    turn = torch.rand(rows).sqrt() * 3 * torch.pi
    angle = turn + arm * torch.pi
    points = turn[:, None] * torch.stack([angle.cos(), angle.sin()], dim=1) / 3
    return points + 0.05 * torch.randn(rows, 2), arm


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
    )
    loss_function = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    sinks = [TableSink(), JsonlSink("runs/plain_loop.jsonl")]
    with Monitor(model, optimizer, every_n_steps=100, loss=loss_function, sinks=sinks) as monitor:
        for _ in range(STEPS):
            points, arm = spirals(ROWS)
            optimizer.zero_grad()
            loss = loss_function(model(points), arm)
            loss.backward()
            optimizer.step()
    print(f"Loss {loss.item():.3f}; {len(monitor.reports)} reports in runs/plain_loop.jsonl")


if __name__ == "__main__":
    main()
