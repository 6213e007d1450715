"""Regression on columns as they come: how far diabetes has got in a year, by ten measurements.

scikit-learn's table of 442 people, with columns as they were measured (a cholesterol of 189 beside
a sex of 1 or 2) and a target of mean 152. An MLP with Adam and the mean square error, as in many a
first attempt. Each seed has a split, initial weights and an order of its own.
"""

from collections.abc import Iterator
from itertools import count

import torch
from case import Batch, Case, Part
from torch import Tensor, nn
from torch.nn.functional import mse_loss

TRAIN, HELD_OUT, ROWS = 300, 71, 32


def case(data: str, *, quick: bool, device: str = "cpu") -> Case:
    """The case; it has data of its own."""
    from sklearn.datasets import load_diabetes

    found = load_diabetes(scaled=False)
    x = torch.tensor(found.data, dtype=torch.float32, device=device)
    y = torch.tensor(found.target, dtype=torch.float32, device=device).unsqueeze(1)

    def part(seed: int) -> Part:
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        train, held_out, test = order.tensor_split((TRAIN, TRAIN + HELD_OUT))

        def batches() -> Iterator[Batch]:
            for epoch in count():
                chance = torch.Generator().manual_seed(1_000_003 * seed + epoch)
                for rows in torch.split(torch.randperm(len(train), generator=chance), ROWS):
                    yield x[train[rows]], y[train[rows]]

        return Part(
            batches,
            lambda model: -error(model, x[held_out], y[held_out]),
            lambda model: error(model, x[test], y[test]),
        )

    return Case(
        title="Regression on columns as they come",
        setting=f"MLP of two hidden layers, 64 wide, ReLU; Adam; mean square error; batches of "
        f"{ROWS}; no preprocessing of columns or target.",
        data="scikit-learn's diabetes, 442 rows, unscaled",
        expected="The loss falls smoothly at the best learning rate and looks healthy. The audit "
        "names the columns' or the target's scale first. With its first advice, for the whole run "
        "and with the learning rate swept again, the root mean square test error is lower by more "
        "than two standard errors.",
        unit="root mean square test error",
        higher=False,
        rates=(3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1),
        steps=20 if quick else 1000,
        model=lambda: model().to(device),
        optimizer=lambda model, lr: torch.optim.Adam(model.parameters(), lr),
        scheduler=None,
        loss=lambda model, batch: mse_loss(model(batch[0]), batch[1]),
        part=part,
        test_share=(len(x) - TRAIN - HELD_OUT) / TRAIN,
    )


def model() -> nn.Module:
    """The network."""
    return nn.Sequential(
        *(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    )


@torch.no_grad()
def error(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Root mean square error."""
    return float(mse_loss(model(x), y).sqrt())
