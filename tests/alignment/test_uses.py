"""Weights used by other functions than linear layers, each against its definition by hand."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional

from adiv_monitor.alignment import Alignment, Probe
from adiv_monitor.report import AlignmentReading

WIDTH, ROWS = 20, 12


class Between(nn.Module):
    """A function of weights between two linear layers."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **held: Any) -> None:
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        for name, value in held.items():
            setattr(self, name, value)
        self.function = function
        self.head = nn.LazyLinear(3)

    def before(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.function(self, self.before(x))))


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) / WIDTH**0.5)


def built(function: Callable[[Any, Tensor], Tensor], **held: Any) -> Between:
    model = Between(function, **held)
    model(torch.randn(ROWS, 8))
    return model.double()


def moved(model: nn.Module) -> nn.Module:
    """Move the weights, and return a copy of the model before the move."""
    before = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn_like(p) * p.abs().mean()
    return before


Rows = list[tuple[Tensor, Tensor]]  # the matrix and the features of every row


def ratios(before: Rows, after: Rows) -> dict[str, float]:
    """Return log_n of RMS(W z) / (RMS W · RMS z) over all rows, each matrix with its own RMS."""
    n = before[0][1].numel()
    found = {}
    pairs = list(zip(before, after, strict=True))
    for name, term in {
        "alpha": [(W - W0, z0) for (W0, z0), (W, _) in pairs],
        "omega": [(W0, z - z0) for (W0, z0), (_, z) in pairs],
        "u": [(W - W0, z - z0) for (W0, z0), (W, z) in pairs],
        "cumulative": after,
    }.items():
        size = sum((W @ z).square().mean().item() for W, z in term)
        bound = sum((W.square().mean() * z.square().mean()).item() for W, z in term)
        found[name] = math.log(size / bound) / (2 * math.log(n))
    return found


def alone(W: Tensor, z: Tensor) -> Rows:
    """Return rows that share one matrix."""
    return [(W, row) for row in z]


def heads(model: Any, x: Tensor) -> Rows:
    """Return rows of a weight with heads: all heads together are one matrix."""
    return alone(model.w.mT.flatten(0, 1), x)


# (path, model, every row by hand, fan-in, fan-out)
CASES: dict[str, tuple[str, Callable[[], Between], Callable[[Any, Tensor], Rows], int, int]] = {
    "einsum": (
        "w",
        lambda: built(lambda m, x: torch.einsum("bn,hnd->bhd", x, m.w), w=weight(4, WIDTH, 6)),
        heads,
        WIDTH,
        24,
    ),
    "on the left": (
        "w",
        lambda: built(lambda m, x: (m.w @ x.t()).t(), w=weight(7, WIDTH)),
        lambda m, x: alone(m.w, x),
        WIDTH,
        7,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_maps(name: str) -> None:
    path, build, rows, fan_in, fan_out = CASES[name]
    torch.manual_seed(2)
    model, x = build(), torch.randn(ROWS, 8, dtype=torch.float64)
    alignment = Alignment(model, Probe(x, max_rows=None))
    before = moved(model)
    reading = alignment.read()[path]
    with torch.no_grad():
        expected = ratios(*(rows(m, m.before(x)) for m in (before, model)))
    for measure, value in expected.items():
        assert getattr(reading, measure) == pytest.approx(value, abs=1e-9), measure
    layer = next(layer for layer in alignment.layers if layer.path == path)
    assert (layer.fan_in, layer.fan_out, layer.role) == (fan_in, fan_out, "hidden")
    assert layer.width == fan_in
    assert "first" in layer.predecessors
    assert path in alignment.layers[-1].predecessors
    assert alignment.unmeasured == []


TABLES: dict[str, tuple[Callable[[], Between], Callable[[Any], Tensor], int]] = {
    "added": (
        lambda: built(lambda m, x: (x.view(2, -1, WIDTH) + m.w).view(ROWS, -1), w=weight(6, WIDTH)),
        lambda m: m.w.repeat(2, 1),
        6,
    ),
    "indexed": (
        lambda: built(lambda m, x: x + m.w[torch.arange(ROWS) % 5], w=weight(5, WIDTH)),
        lambda m: m.w[torch.arange(ROWS) % 5],
        5,
    ),
    "concatenated": (
        lambda: built(
            lambda m, x: torch.cat([m.w.expand(2, -1, -1), x.view(2, -1, WIDTH)], 1).flatten(0, 1),
            w=weight(1, 3, WIDTH),
        ),
        lambda m: m.w[0].repeat(2, 1),
        3,
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables(name: str) -> None:
    """A position table is an embedding: its width is that of its rows, not their number."""
    build, outputs, entries = TABLES[name]
    model, x = build(), torch.randn(ROWS, 8, dtype=torch.float64)
    alignment = Alignment(model, Probe(x, max_rows=None))
    before = moved(model)
    reading: AlignmentReading = alignment.read()["w"]
    layer = next(layer for layer in alignment.layers if layer.path == "w")
    assert (layer.kind, layer.role, layer.predecessors) == ("table", "embedding", ())
    assert (layer.fan_in, layer.fan_out, layer.width) == (entries, WIDTH, WIDTH)
    assert set(alignment.layers[-1].predecessors) == {"first", "w"}
    y0, y = outputs(before).detach(), outputs(model).detach()
    assert reading.rows == len(y)
    assert reading.output_rms == pytest.approx(y.square().mean().sqrt().item())
    assert reading.output_change_rms == pytest.approx((y - y0).square().mean().sqrt().item())
    assert (reading.alpha, reading.omega, reading.u) == (None, None, None)


def test_recurrent_layers_are_named_and_looked_through() -> None:
    model = built(lambda m, x: m.rnn(x)[0], rnn=nn.LSTM(WIDTH, 18, num_layers=2))
    alignment = Alignment(model, Probe(torch.randn(5, 8).double()))
    fed = {layer.path: layer.predecessors for layer in alignment.layers}
    assert fed == {"first": (), "head": ("first",)}
    assert "recurrent layers are not measured" in alignment.refused["rnn.weight_hh_l1"]
    assert "rnn.weight_hh_l1" in alignment.unmeasured


def test_vectors_are_no_layers_and_known_to_the_layers_that_they_act_on() -> None:
    model = built(
        lambda m, x: m.norm(torch.cat([m.token.expand(ROWS, -1), x], 1) * m.gain),
        token=weight(1, WIDTH),
        gain=weight(2 * WIDTH),
        norm=nn.LayerNorm(2 * WIDTH),
    )
    alignment = Alignment(model, Probe(torch.randn(ROWS, 8).double()))
    names = {id(p): name for name, p in model.named_parameters()}
    acting = {x.path: {names[id(p)] for p in x.entrywise} for x in alignment.layers}
    assert acting == {
        "first": {"first.bias", "gain", "norm.weight", "norm.bias"},
        "head": {"head.bias"},
    }
    assert alignment.unmeasured == []


def test_a_weight_that_is_looked_up_and_multiplied_is_two_layers() -> None:
    tokens = torch.arange(ROWS) % 5
    model = built(
        lambda m, x: functional.linear(x + m.table(tokens), m.table.weight),
        table=nn.Embedding(5, WIDTH),
    )
    alignment = Alignment(model, Probe(torch.randn(ROWS, 8).double()))
    kinds = {layer.path: (layer.kind, layer.fan_in, layer.fan_out) for layer in alignment.layers}
    assert kinds["table"] == ("embedding", 5, WIDTH)
    assert kinds["table.weight"] == ("linear", WIDTH, 5)
    both = built(
        lambda m, x: torch.einsum("bi,ij->bj", torch.einsum("bi,ji->bj", x, m.w), m.w),
        w=weight(WIDTH, WIDTH),
    )
    paths = [layer.path for layer in Alignment(both, Probe(torch.randn(ROWS, 8).double())).layers]
    assert paths == ["first", "w", "w@linear", "head"]


def test_what_can_not_be_measured_is_named_with_the_reason() -> None:
    model = built(
        lambda m, x: m.linear(x) + m.bag(torch.arange(2 * ROWS).view(ROWS, 2) % 5),
        linear=nn.Linear(WIDTH, WIDTH),
        bag=nn.EmbeddingBag(5, WIDTH, mode="max"),
    )
    alignment = Alignment(model, Probe(torch.randn(ROWS, 8).double()))
    assert alignment.unmeasured == ["bag.weight"]
    assert "mode='max'" in alignment.refused["bag.weight"]
    mapped = built(lambda m, x: vmap(m.linear)(x), linear=nn.Linear(WIDTH, WIDTH))
    alignment = Alignment(mapped, Probe(torch.randn(ROWS, 8).double()))
    assert alignment.unmeasured == ["linear.weight"]
    assert "torch.func" in alignment.refused["linear.weight"]


def test_a_computed_weight_is_the_matrix_that_is_used() -> None:
    model = built(lambda m, x: functional.linear(x, m.w * 2, m.b), w=weight(7, WIDTH), b=weight(7))
    x = torch.randn(ROWS, 8).double()
    alignment = Alignment(model, Probe(x, max_rows=None))
    before = moved(model)
    with torch.no_grad():
        expected = ratios(*(alone(2 * m.w, m.before(x)) for m in (before, model)))
    assert alignment.read()["w"].alpha == pytest.approx(expected["alpha"], abs=1e-9)
    assert any(p is model.b for p in alignment.layers[1].entrywise)


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this torch has no grouped products")
def test_experts_whose_rows_are_routed_anew_tell_no_change() -> None:
    ends = torch.tensor([4, 12], dtype=torch.int32)

    def routed(m: Any, x: Tensor) -> Tensor:
        wide = functional.pad(x, (0, 12)).bfloat16()
        return torch._grouped_mm(wide, m.w, offs=ends).to(x)

    model = Between(routed, w=nn.Parameter(weight(2, 32, 48).detach().bfloat16()))
    model(torch.randn(ROWS, 8))
    alignment = Alignment(model, Probe(torch.randn(ROWS, 8)))
    moved(model)
    reading = alignment.read()["w"]
    assert (reading.kind, reading.fan_in, reading.fan_out) == ("experts", 32, 48)
    assert (reading.alpha, reading.omega, reading.u) == (None, None, None)
    assert reading.output_change_rms is None
    assert reading.cumulative is not None
