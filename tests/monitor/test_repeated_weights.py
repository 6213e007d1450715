"""Weights that are repeated for every sample before a product are measured as linear layers."""

from collections.abc import Callable

import pytest
import torch
from setups import EXACT, cosine, same
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from adiv_monitor import Monitor, StepReport
from adiv_monitor.report import REALISED_MEASURES

Function = Callable[[Tensor, Tensor], Tensor]
X = torch.linspace(-3, 4, 5 * 6 * 4, dtype=torch.float64).reshape(5, 6, 4).sin()


class Repeats(nn.Module):
    """A function of its weight (inputs, outputs) and a batch (samples, tokens, inputs)."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-1, 2, 12, dtype=torch.float64).reshape(4, 3).cos())
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.w)


def shown(w: Tensor, x: Tensor) -> Tensor:
    return w.expand(len(x), -1, -1)


def stepped(
    function: Function, *, recomputed: bool = False, is_whole: bool = True, **options: object
) -> StepReport:
    """Take a step of two micro-batches; assert that the descents sum to −⟨∂L/∂w, Δw⟩."""
    model = Repeats(function)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = {"realised": lambda y: y.tanh().square().sum(), "on_error": "raise", **options}
    with Monitor(model, optimizer, **options) as monitor:
        for x in (X, X[:2].cos()):
            y = checkpoint(model, x, use_reentrant=False) if recomputed else model(x)
            y.tanh().square().sum().backward()
        before = model.w.detach().clone()
        optimizer.step()
        truth = ((before - model.w.detach()) * model.w.grad).sum().item()
    report = monitor.latest
    assert report is not None
    assert report.coverage == 1 or not is_whole
    assert not report.notes
    assert sum(reading.descent for reading in report.layers.values()) == pytest.approx(truth)
    return report


PRODUCTS: dict[str, Function] = {
    "bmm": lambda x, w: torch.bmm(x, shown(w, x)),
    "@ from the left": lambda x, w: (w.t().unsqueeze(0).expand(len(x), -1, -1) @ x.mT).mT,
    "einsum": lambda x, w: torch.einsum("bik,bkj->bij", x, w.expand(len(x), 4, 3)),
    "baddbmm": lambda x, w: torch.baddbmm(torch.zeros(len(x), 6, 3).double(), x, shown(w, x)),
    "repeat": lambda x, w: torch.bmm(x, w.repeat(len(x), 1, 1)),
    "turned": lambda x, w: (shown(w, x).transpose(1, 2) @ x.mT).mT,
    "turned by an attribute": lambda x, w: (shown(w, x).mT @ x.mT).mT,
    "one after the other": lambda x, w: torch.stack(
        [each @ shown(w, x)[i] for i, each in enumerate(x)]
    ),
    "of size one": lambda x, w: x @ w[None],
    "broadcast": lambda x, w: x[:, None] @ w[None, None].expand(len(x), 1, 4, 3),
}


@pytest.mark.parametrize("max_rows", [None, 7], ids=["all-rows", "sampled"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_measured_like_matmul(name: str, max_rows: int | None) -> None:
    found = stepped(PRODUCTS[name], max_rows=max_rows).layers
    plain = stepped(torch.matmul, max_rows=max_rows).layers
    assert found.keys() == plain.keys() == {"w"}
    assert (found["w"].kind, found["w"].rows_total) == ("linear", 42)
    measures, expected = found["w"].measures(), plain["w"].measures()
    assert measures.keys() == expected.keys()
    errors = found["w"].standard_error
    for measure, value in expected.items():  # in another token order, sampled rows differ
        same = EXACT if max_rows is None or measure not in errors else {"rel": 2, "abs": 1}
        assert measures[measure] == pytest.approx(value, **same), measure


def test_two_products_are_two_calls_of_one_layer() -> None:
    def twice(x: Tensor, w: Tensor) -> Tensor:
        repeated = shown(w, x)
        return torch.bmm(torch.bmm(x, repeated).sin().repeat(1, 1, 2)[..., :4], repeated)

    report = stepped(twice, max_rows=None)
    assert report.layers["w"].rows_total == 2 * 42


def test_recomputation_under_checkpointing() -> None:
    found = stepped(PRODUCTS["bmm"], recomputed=True, max_rows=None).layers["w"].measures()
    assert found == pytest.approx(stepped(torch.matmul, max_rows=None).layers["w"].measures())


ENTRIES: dict[str, tuple[Function, Function]] = {
    "expand_as": (
        lambda x, w: w[0].expand_as(x[..., :3]) * x[..., :3],
        lambda x, w: w[0] * x[..., :3],
    ),
    "broadcast_to": (
        lambda x, w: x * torch.broadcast_to(w[:, 0], x.shape),
        lambda x, w: x * w[:, 0],
    ),
    "a table": (
        lambda x, w: w.expand(5, 4, 3)[: len(x)] * x[:, :4, :3],
        lambda x, w: w * x[:, :4, :3],
    ),
    "repeat": (lambda x, w: w.repeat(len(x), 1, 1) * x[:, :4, :3], lambda x, w: w * x[:, :4, :3]),
    "prelu": (
        lambda x, w: functional.prelu(x.mT, w[0, :1].expand(4)),
        lambda x, w: functional.prelu(x.mT, w[0, :1]),
    ),
    "a number": (lambda x, w: x * w[0, :1].expand(4), lambda x, w: x * w[0, :1]),
}


@pytest.mark.parametrize("max_rows", [None, 7], ids=["all-rows", "sampled"])
@pytest.mark.parametrize("name", ENTRIES)
def test_an_elementwise_product_is_a_gain(name: str, max_rows: int | None) -> None:
    repeated, plain = (stepped(f, is_whole=False, max_rows=max_rows) for f in ENTRIES[name])
    assert [reading.kind for reading in repeated.layers.values()] == ["gain"]
    same(repeated, plain)


WITHIN: dict[str, Function] = {
    "kernel": lambda x, w: functional.conv1d(x, w[:1, None].expand(6, 1, 3), groups=6),
    "copied kernel": lambda x, w: functional.conv1d(x, w[:1, None].repeat(6, 1, 1), groups=6),
    "norm": lambda x, w: functional.layer_norm(x, (4,), w[0, :1].expand(4)),
    "bias": lambda x, w: functional.linear(x, torch.ones(2, 4).double(), w[0, :1].expand(2)),
    "outputs": lambda x, w: functional.linear(x, w[:, 0].expand(2, 4)),
    "inputs": lambda x, w: x @ w[:1].expand(4, 3),
    "copies that are reshaped": lambda x, w: w[:, 0].repeat(len(x), 1)[:, None] * x,
    "of what every sample sees": lambda x, w: (x[0] @ shown(w, x)) * x.mean((1, 2), keepdim=True),
}


@pytest.mark.parametrize("name", WITHIN)
def test_a_weight_that_is_repeated_within_itself_is_measured_through_its_module(name: str) -> None:
    """Its use is not that of its copies as an offset, and no rule knows it."""
    model = Repeats(WITHIN[name])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Monitor(model, optimizer, on_error="raise", max_rows=None) as monitor:
        z = model(X)
        z.retain_grad()
        z.tanh().square().sum().backward()
        optimizer.step()
        d = (z - model(X)).detach()
    report = monitor.latest
    assert report is not None
    (reading,) = report.layers.values()
    assert (reading.kind, z.grad is None) == ("module", False)
    assert reading.update_cosine == pytest.approx(cosine(d, z.grad), rel=1e-3)  # type: ignore[arg-type]


OTHERS: dict[str, Function] = {
    "only a sum": lambda x, w: x[..., :3] + shown(w, x).mean(1, keepdim=True),
    "nobody": lambda x, w: shown(w, x),
    "first a product": lambda x, w: torch.bmm(x, e := shown(w, x)) + e.sin().sum(1, keepdim=True),
    "then a product": lambda x, w: (e := shown(w, x)).sin().sum(1, keepdim=True) + torch.bmm(x, e),
    "in place": lambda x, w: torch.bmm(x, w.repeat(len(x), 1, 1).mul_(2)),
    "added in place": lambda x, w: x[:, :4, :3].clone().add_(shown(w, x)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_repeated_row_is_an_offset(name: str) -> None:
    """A row is one repetition of a row of w, counted once, whatever uses it."""
    report = stepped(OTHERS[name], max_rows=None)
    (reading,) = report.layers.values()
    assert (reading.kind, reading.rows_total) == ("offset", 7 * 4)
    assert set(REALISED_MEASURES) <= reading.measures().keys()


class Pool(nn.Module):
    """Attention with learned tokens, repeated for every sample, as query, key or value."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.linspace(-1, 2, 12).reshape(1, 3, 4).cos())
        self.attention = nn.MultiheadAttention(4, 2, batch_first=role != "query")
        self.decoder = nn.TransformerDecoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.role = role

    def forward(self, x: Tensor) -> Tensor:
        shown = self.shown = self.tokens.expand(len(x), -1, -1)
        if self.role == "decoder":
            found: Tensor = self.decoder(shown, x)
            return found
        first = {
            "query": lambda: (shown.transpose(0, 1), x.transpose(0, 1), x.transpose(0, 1)),
            "key": lambda: (x, shown, x[:, :3]),
            "value": lambda: (x, x[:, :3], shown),
            "all": lambda: (shown, shown, shown),
        }[self.role]
        result: Tensor = self.attention(*first())[0]
        return result


@pytest.mark.parametrize("role", ["query", "key", "value", "all", "decoder"])
def test_learned_tokens_of_attention_are_counted_once(role: str) -> None:
    """Attention takes its inputs several times, in functions that it calls."""
    torch.manual_seed(0)
    model = Pool(role).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with Monitor(model, optimizer, on_error="raise", max_rows=None) as monitor:
        (model(X) + 0.5).square().sum().backward(inputs=[*model.parameters(), model.shown])
        before, g = model.tokens.detach().clone(), model.shown.grad
        optimizer.step()
    report = monitor.latest
    assert report is not None
    assert g is not None
    assert not report.notes
    reading = report.layers["tokens"]
    d = (before - model.tokens.detach()).expand_as(g)
    assert (reading.kind, reading.rows_total) == ("offset", len(X) * 3)
    assert reading.update_cosine == pytest.approx(cosine(d, g))
    assert reading.gradient_cosine == pytest.approx(cosine(g.sum(0).expand_as(g), g))
