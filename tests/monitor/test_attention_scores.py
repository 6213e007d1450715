"""Attention scores, their gradients and their change by a step agree with slow references."""

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from adiv_layers import convert
from attending import MODELS, SAMPLES, TOKENS, Spy, explicit, tensors
from computes import Computes
from setups import EXACT, one_step, trained
from torch import Tensor, nn
from torch.nn import functional

from adiv_monitor import Monitor
from adiv_monitor.features.uses import Refused
from adiv_monitor.maths import scores
from adiv_monitor.maths.attention import attention_reading
from adiv_monitor.maths.scores import RECORD
from adiv_monitor.maths.scores import attention as arguments
from adiv_monitor.probe import attention
from adiv_monitor.report import AttentionReading

ALL = slice(None)


def bool_mask(*shape: int) -> Tensor:
    torch.manual_seed(5)
    mask = torch.rand(shape) < 0.6
    mask[..., 0, :] = False  # a query with all keys masked
    return mask


CALLS: dict[str, tuple[list[tuple[int, ...]], dict[str, Any]]] = {
    "plain": ([(3, 2, 5, 4), (3, 2, 7, 4), (3, 2, 7, 6)], {}),
    "scale": ([(3, 2, 5, 4), (3, 2, 7, 4), (3, 2, 7, 4)], {"scale": 0.3}),
    "causal": ([(3, 2, 6, 4)] * 3, {"is_causal": True}),
    "causal, more keys": ([(2, 2, 4, 4), (2, 2, 6, 4), (2, 2, 6, 4)], {"is_causal": True}),
    "causal, fewer keys": ([(2, 2, 6, 4), (2, 2, 4, 4), (2, 2, 4, 4)], {"is_causal": True}),
    "grouped": ([(3, 6, 5, 4), (3, 2, 7, 4), (3, 2, 7, 4)], {"enable_gqa": True}),
    "boolean": ([(3, 2, 5, 4)] * 3, {"attn_mask": bool_mask(5, 5)}),
    "boolean, of keys": ([(3, 2, 5, 4)] * 3, {"attn_mask": bool_mask(3, 1, 2, 5)[:, :, 1:]}),
    "boolean, of samples": ([(3, 2, 5, 4)] * 3, {"attn_mask": bool_mask(3, 1, 5, 5)}),
    "boolean, of heads": ([(3, 2, 5, 4)] * 3, {"attn_mask": bool_mask(2, 5, 5)}),
    "additive": ([(3, 2, 5, 4)] * 3, {"attn_mask": tensors((3, 2, 5, 5))[0]}),
    "infinite": (
        [(3, 2, 5, 4)] * 3,
        {"attn_mask": torch.where(bool_mask(1, 2, 5, 5), 0.0, -torch.inf)},
    ),
    "no heads": ([(3, 5, 4), (3, 7, 4), (3, 7, 4)], {"attn_mask": bool_mask(3, 5, 7)}),
    "one matrix": ([(5, 4), (7, 4), (7, 4)], {}),
    "more samples": ([(2, 3, 2, 5, 4)] * 3, {"attn_mask": bool_mask(3, 1, 5, 5)}),
    "shared keys": ([(3, 2, 5, 4), (1, 2, 7, 4), (1, 2, 7, 4)], {}),
}


def as_four(tensor: Tensor) -> Tensor:
    while tensor.dim() < 4:
        tensor = tensor.unsqueeze(-3)
    return tensor.flatten(0, -4)


@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_those_of_explicit_scores(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes, others = CALLS[name]
    query, key, value = tensors(*shapes)
    Y, output = explicit(query.requires_grad_(), key, value, **others)
    query = query.detach()
    fused = functional.scaled_dot_product_attention(query, key, value, **others)
    torch.testing.assert_close(fused, output, rtol=1e-10, atol=1e-12)
    d_output = torch.randn_like(output)
    output.backward(d_output)
    assert Y.grad is not None

    monkeypatch.setattr(scores, "CHUNK", 30)  # several chunks
    call = replace(arguments(query, key, value, **others), gradient=as_four(d_output))
    of, parts = call.score_gradient, list(call.parts)
    assert len(parts) > 1
    G = torch.cat([of(part) for part in parts], 2)
    torch.testing.assert_close(G, as_four(Y.grad), rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(of(ALL), G)


def test_dropout_is_refused() -> None:
    with pytest.raises(Refused, match="dropout in evaluation mode"):
        arguments(*tensors((1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4)), dropout_p=0.1)


# The readings of one step


class Reference:
    """One step of a model, whose last attention forms its scores explicitly.

    The scores' move is that of the whole model's run with other parameters of the module that
    holds the attention, by a difference quotient; their scale is the square of each one's gradient.
    """

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.manual_seed(3)
        model, self.path = MODELS[name]()
        self.model = model.double()
        for parameter in self.model.parameters():  # so that no gain is 1 and no bias 0
            parameter.data += 0.1 * torch.randn_like(parameter)
        self.x = torch.randn(SAMPLES, TOKENS, 12, dtype=torch.float64)
        self.monkeypatch = monkeypatch
        named = self.model.get_submodule(self.path).named_parameters()
        self.held = {n: p for n, p in named if p.requires_grad}

    def loss(self, output: Tensor) -> Tensor:
        aims = torch.arange(output.numel(), dtype=output.dtype).cos().view_as(output)
        return (output * aims).sin().sum()

    def scores(self) -> Tensor:
        with self.monkeypatch.context() as patch:
            spy = Spy(patch)
            loss = self.loss(self.model(self.x))
            if torch.is_grad_enabled():
                loss.backward(retain_graph=True)
            return spy.scores[-1]

    def change(self, direction: dict[str, Tensor]) -> Tensor:
        """Return the scores' derivative along a direction, up to the fourth order of a step."""

        def at(size: float) -> Tensor:
            with torch.no_grad():
                for name, tangent in direction.items():
                    self.held[name] += size * tangent
                found = self.scores()
                for name, tangent in direction.items():
                    self.held[name] -= size * tangent
            return found

        wide, narrow = ((at(s) - at(-s)) / (2 * s) for s in (2e-4, 1e-4))
        return (4 * narrow - wide) / 3

    def scale(self, Y: Tensor) -> Tensor:
        """Return ‖∂Y_ts/∂Θ‖² of every score, one by one."""
        held = [*self.held.values()]
        found = []
        for score in Y.flatten():
            parts = torch.autograd.grad(score, held, retain_graph=True, allow_unused=True)
            found.append(sum(part.square().sum() for part in parts if part is not None))
        return torch.stack(found).view(Y.shape)


@pytest.mark.slow(one_in=14)
@pytest.mark.parametrize("name", MODELS)
def test_readings_of_models(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = Reference(name, monkeypatch)
    Y = reference.scores()
    G = Y.grad
    assert G is not None
    held = reference.held
    gamma = {n: p.grad.clone() for n, p in held.items() if p.grad is not None}
    D, e = reference.scale(Y), reference.change(gamma)
    before = [(p, p.detach().clone()) for p in reference.model.parameters()]
    reference.model.zero_grad()

    trained = [p for p in reference.model.parameters() if p.requires_grad]
    adam = torch.optim.Adam(trained, lr=0.01)
    with Monitor(
        reference.model, adam, attention=True, loss=reference.loss, on_error="raise"
    ) as monitor:
        reference.loss(reference.model(reference.x)).backward()
        adam.step()
    reading = list(monitor.latest.attention.values())[-1]
    after = {n: p.detach().clone() for n, p in held.items()}
    for parameter, old in before:
        parameter.data.copy_(old)
    taken = {n: p.detach() - after[n] for n, p in held.items()}
    d, active = reference.change(taken), G != 0

    def expected(part: Any) -> dict[str, float]:
        of = active[part]
        G_, d_, e_, D_ = (x[part][of] for x in (G, d, e, D))
        return {
            "attention_cosine": functional.cosine_similarity(d_, G_, 0).item(),
            "attention_gradient_cosine": functional.cosine_similarity(e_, G_, 0).item(),
            "attention_scale_mean": D_.mean().item(),
            "attention_scale_cv": (D_.std(correction=0) / D_.mean()).item(),
        }

    # The transformers library rounds the sines of a rotation to float32.
    precision = 1e-6 if "model" in dict(reference.model.named_children()) else 1e-8
    whole = {name: reading.measures()[name] for name in expected(np.s_[:])}  # others: test_health
    assert whole == pytest.approx(expected(np.s_[:]), rel=precision)
    of_head = {name: reading.heads[name][1] for name in whole}
    assert of_head == pytest.approx(expected(np.s_[:, 1]), rel=precision)


# Errors


def of_scales(scale: np.ndarray, square: np.ndarray) -> AttentionReading:
    """Return the reading of two samples with three heads, from sums over their 50 scores."""
    record = np.full((2, 3, sum(RECORD.values())), np.nan)
    record[..., 0], record[..., -32:-16], record[..., -16:] = 50.0, scale, square
    return attention_reading(record)


@pytest.mark.parametrize("most", [2.0, 0.5], ids=["unequal", "almost equal"])
def test_errors_of_scales_by_random_moves_are_what_they_say(most: float) -> None:
    draw, moves = np.random.default_rng(1), 16
    J = draw.normal(size=(2, 3, 50, 40)) * draw.uniform(0.5, most, (2, 3, 50, 1))  # ∂Y/∂Θ
    D = (J**2).sum(3)
    known = of_scales(*(x.sum(2)[..., None] for x in (D, D**2))).measures()
    truth = {name: known[name] for name in ("attention_scale_mean", "attention_scale_cv")}
    deviations: dict[str, list[float]] = {name: [] for name in truth}
    for _ in range(300):
        x = (J @ draw.normal(size=(40, moves))) ** 2
        reading = of_scales(x.sum(2), (x**2).sum(2) / 3)
        for name, of in deviations.items():
            of.append((getattr(reading, name) - truth[name]) / reading.standard_error[name])
    for name, values in deviations.items():
        assert 0.7 < np.std(values) < 1.35, (name, np.std(values))
        assert abs(np.mean(values)) < 0.4, (name, np.mean(values))


def twice(m: nn.Module, x: Tensor) -> Tensor:
    """Call one attention on all samples and on some of them."""
    outputs = [m.attention(y, y, y, need_weights=False)[0] for y in (x, x[:2].cos())]
    return torch.cat(outputs).sin().sum()


@pytest.mark.parametrize("most", [0, 12_000], ids=["all", "of one of two calls"])
def test_random_moves_agree_with_exact_scales(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def reading() -> AttentionReading:
        torch.manual_seed(0)
        x = torch.randn(4, 6, 6)
        model = Computes(twice, attention=nn.MultiheadAttention(6, 3, batch_first=True))
        (report,) = trained(model, lambda model: model(x), attention=True)
        return report.attention["attention"]

    exact = reading()
    monkeypatch.setattr(attention, "_MOST_EXACT", most)
    found = reading()
    assert not exact.standard_error and len(found.standard_error) == 2
    assert exact.samples_seen == found.samples_seen == 6
    for name, error in found.standard_error.items():
        assert abs(getattr(found, name) - getattr(exact, name)) < 4 * error


X = torch.linspace(-1, 1, 3 * 5 * 8, dtype=torch.float64).reshape(3, 5, 8).sin()
Y = torch.linspace(-2, 1, 3 * 4 * 8, dtype=torch.float64).reshape(3, 4, 8).cos()

KINDS = {
    "packed": {},
    "no bias": {"bias": False},
    "widths of their own": {"kdim": 6, "vdim": 5},
    "one more key": {"add_bias_kv": True},
}
NAMES = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "out_proj": "out_proj"}


class Net(nn.Module):
    def __init__(self, kind: str, *, cross: bool, weights: bool) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, **KINDS[kind])
        self.cross, self.weights = cross or "kdim" in KINDS[kind], weights

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        other = self.before(Y).tanh() if self.cross else x
        keys = other[..., : self.attention.kdim]
        values = other[..., : self.attention.vdim]
        attended, _ = self.attention(x, keys, values, need_weights=self.weights)
        return attended


@pytest.mark.slow(one_in=7)
@pytest.mark.parametrize("weights", [False, True], ids=["fused", "with weights"])
@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
@pytest.mark.parametrize("kind", KINDS)
def test_opened_into_layers_it_reads_the_same(kind: str, cross: bool, weights: bool) -> None:
    torch.manual_seed(1)
    model = Net(kind, cross=cross, weights=weights).double()
    opened = copy.deepcopy(model)
    convert(opened, "standard", attention=True)
    reports = [
        one_step(m, lambda m: m(X).square().sum().backward(), max_rows=None)
        for m in (model, opened)
    ]
    for report in reports:
        assert report.coverage == 1.0
        assert not report.unsupported
    for part, name in NAMES.items():
        found = reports[0].layers[f"attention.{part}"]
        expected = reports[1].layers[f"attention.{name}"]
        assert (found.kind, found.rows_total) == (expected.kind, expected.rows_total)
        assert found.measures() == pytest.approx(expected.measures(), **EXACT)
