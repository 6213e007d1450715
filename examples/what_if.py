"""What if a network had corrected layers? Two copies take a step on one batch, side by side.

The rows of the batch have very different lengths. In affine-like layers, with the same parameters,
every row has the same scale. The step is smaller there, so they need another learning rate.

    python examples/what_if.py
"""

import copy

import torch
from adiv_layers import convert
from torch import Tensor, nn

from adiv_monitor import LayerReading, Monitor

MEASURES = ("update_cosine", "scale_cv", "effective_lr")


def first_step(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, LayerReading]:
    """Return the readings of one step of gradient descent on a batch, layer by layer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, optimizer) as monitor:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        monitor.log_loss(loss)
        optimizer.step()
    return dict(monitor.latest.layers)


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    corrected = copy.deepcopy(model)
    print(convert(corrected, "affine-like"))
    x = torch.randn(64, 16) * torch.randn(64, 1).exp()
    y = torch.randint(4, (64,))
    as_it_is, what_if = first_step(model, x, y), first_step(corrected, x, y)
    print(f"\n{'layer':8}{'measure':16}{'as it is':>12}{'affine-like':>14}")
    for path, reading in as_it_is.items():
        for measure in MEASURES:
            values = getattr(reading, measure), getattr(what_if[path], measure)
            print(f"{path:8}{measure:16}{values[0]:12.3f}{values[1]:14.3f}")


if __name__ == "__main__":
    main()
