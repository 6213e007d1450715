"""Weights that are repeated, as for every sample, are measured as that repetition: an offset."""

from collections.abc import Callable

import pytest
import torch
from setups import cosine
from torch import Tensor, nn
from torch.nn import functional

from adiv_monitor import Monitor
from adiv_monitor.report import REALISED_MEASURES

Function = Callable[[Tensor, Tensor], Tensor]
X = torch.linspace(-3, 4, 5 * 6 * 4, dtype=torch.float64).reshape(5, 6, 4).sin()


class Repeats(nn.Module):
    """A function of its repeated weight (samples, inputs, outputs) and a batch."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-1, 2, 12, dtype=torch.float64).reshape(4, 3).cos())
        self.function = function
        self.shown: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        shown = self.w.expand(len(x), -1, -1)
        if shown.requires_grad:
            shown.retain_grad()
        self.shown.append(shown)
        return self.function(x, shown)


def stepped(model: Repeats) -> None:
    """Take a step of two micro-batches; assert that the descents sum to −⟨∂L/∂w, Δw⟩."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    realised = lambda y: y.tanh().square().sum()  # noqa: E731
    with Monitor(model, optimizer, on_error="raise", realised=realised, max_rows=None) as monitor:
        for x in (X, X[:2].cos()):
            realised(model(x)).backward()
        before = model.w.detach().clone()
        optimizer.step()
        moved = before - model.w.detach()
        truth = (moved * model.w.grad).sum().item()
    report = monitor.latest
    assert report is not None
    assert (report.coverage, report.notes) == (1, ())
    (reading,) = report.layers.values()
    assert (reading.kind, reading.rows_total) == ("offset", 7 * 4)
    assert reading.descent == pytest.approx(truth)
    G = torch.cat([shown.grad for shown in model.shown[:2]])  # type: ignore[misc]
    active = G.abs().sum(-1) > 0
    d = moved.expand_as(G)
    assert reading.update_cosine == pytest.approx(cosine(d[active], G[active]))
    assert set(REALISED_MEASURES) <= reading.measures().keys()


USES: dict[str, Function] = {
    "a product": torch.bmm,
    "from the left": lambda x, e: (e.mT @ x.mT).mT,
    "einsum": lambda x, e: torch.einsum("bik,bkj->bij", x, e),
    "a sum": lambda x, e: x[..., :3] + e.mean(1, keepdim=True),
    "nobody": lambda x, e: e * 1,
    "twice": lambda x, e: torch.bmm(x, e) + e.sin().sum(1, keepdim=True),
    "an elementwise product": lambda x, e: e * x[:, :4, :3],
    "written to data": lambda x, e: x[:, :4, :3].clone().add_(e),
    "a kernel": lambda x, e: functional.conv1d(x.mT, e.mT[0, :, :, None]),
}


@pytest.mark.parametrize("name", USES)
def test_a_repeated_row_is_an_offset_whatever_uses_it(name: str) -> None:
    stepped(Repeats(USES[name]))
