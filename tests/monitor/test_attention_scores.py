"""Attention scores, their gradients and their change by a step agree with slow references."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import torch
from attending import MODELS, Spy, explicit, tensors
from torch import Tensor, nn
from torch.nn import functional

from adiv_monitor.capture.attention.attention_dropout import kept
from adiv_monitor.capture.attention.score_moves import (
    AttentionModule,
    moves_of_scores,
    scores_with_graph,
    twin_of,
)
from adiv_monitor.capture.attention.score_scales import scales, some_keys
from adiv_monitor.capture.attention.some_samples import of_samples
from adiv_monitor.features import scores
from adiv_monitor.features.scores import attention, of_heads
from adiv_monitor.features.uses import Refused
from adiv_monitor.maths.attention import attention_reading
from adiv_monitor.maths.attention_sums import (
    AttentionSums,
    MoveSums,
    RerunErrors,
    ScaleSums,
    map_samples,
    merge,
    move_sums,
    scale_sums,
)
from adiv_monitor.maths.records import numbers_of, with_numbers
from adiv_monitor.maths.sums import Array
from adiv_monitor.rerun.randomness import Randomness

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
def test_output_and_gradient_are_those_of_explicit_scores(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    call = attention(query, key, value, **others)
    torch.testing.assert_close(call.output(), as_four(output.detach()), rtol=1e-10, atol=1e-12)
    of = call.score_gradient(d_output)
    parts = list(call.parts)
    assert len(parts) > 1
    G = torch.cat([of(part) for part in parts], 2)
    torch.testing.assert_close(G, as_four(Y.grad), rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(of(ALL), G)


@pytest.mark.parametrize("name", [n for n, (s, _) in CALLS.items() if len(s[0]) in (3, 4)])
def test_some_samples_are_those_of_the_whole_call(name: str) -> None:
    shapes, others = CALLS[name]
    query, key, value = tensors(*shapes)
    samples = torch.tensor([1, 0])
    some = attention(query, key, value, **others, samples=samples)
    whole = attention(query, key, value, **others)
    torch.testing.assert_close(some.output(), whole.output()[samples], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("keys", [3, 11])  # fewer and more than the values' width
def test_dropout_is_repeated(keys: int, grouped: bool) -> None:
    query, key, value = tensors((4, 4, 6, 5), *[(4, 2 if grouped else 4, keys, 5)] * 2)
    others = {"dropout_p": 0.4, "scale": 0.7, "enable_gqa": grouped}
    value.requires_grad_()
    before = Randomness([query.device])
    output = functional.scaled_dot_product_attention(query, key, value, **others)
    after = Randomness([query.device])
    samples = torch.tensor([0, 2, 3])
    mask = kept(before, samples, query, key, value, **others)
    assert after.is_still(after.now())
    assert mask.float().mean() == pytest.approx(0.6, abs=0.15)
    # torch's own draw on a CPU: one number per probability.
    before.set()
    drawn = torch.empty(4, 4, 6, keys, dtype=torch.float64).bernoulli_(0.6)
    after.set()
    assert torch.equal(mask, drawn[samples] != 0)

    call = attention(query, key, value.detach(), **others, samples=samples)
    with pytest.raises(ValueError, match="kept=None"):
        call.output()
    call = replace(call, kept=mask)
    torch.testing.assert_close(call.output(), output.detach()[samples], rtol=1e-10, atol=1e-12)
    Y, output = explicit(
        query.requires_grad_(),
        key,
        value.detach(),
        dropped=drawn / 0.6,
        scale=0.7,
        enable_gqa=grouped,
    )
    d_output = torch.randn_like(output)
    output.backward(d_output)
    assert Y.grad is not None
    G = call.score_gradient(d_output[samples])(ALL)
    torch.testing.assert_close(G, Y.grad[samples], rtol=1e-8, atol=1e-12)


# Reruns of the module with changed parameters


class Observed:
    """A model after its backward pass, with the inputs and the score gradients of its attention."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.manual_seed(3)
        model, self.path = MODELS[name]()
        self.model = model.double().train()
        for parameter in self.model.parameters():  # so that no gain is 1 and no bias 0
            parameter.data += 0.1 * torch.randn_like(parameter)
        self.module = self.model.get_submodule(self.path)
        self.x = torch.randn(4, 6, 12, dtype=torch.float64)
        self.inputs: list[tuple[Any, Any]] = []
        handle = self.module.register_forward_pre_hook(
            lambda _, args, kwargs: self.inputs.append((args, dict(kwargs))), with_kwargs=True
        )
        with monkeypatch.context() as patch:
            spy = Spy(patch)
            output = self.model(self.x)
            handle.remove()
            self.query, self.key = spy.queries[-1], spy.keys[-1]
            self.key = of_heads(self.key, self.query.shape[1])
            torch.manual_seed(4)
            (output * torch.randn_like(output)).sum().backward()
            (self.Y, self.output) = spy.scores[-1], spy.outputs[-1]
        assert self.Y.grad is not None
        assert self.output.grad is not None
        self.G = self.Y.grad

    def attends(self, samples: Sequence[int] = range(4), **others: object) -> AttentionModule:
        args, kwargs = of_samples(self.module, *self.inputs[0], torch.tensor(samples))
        kwargs |= others
        trained = {n: p.detach() for n, p in self.module.named_parameters() if p.requires_grad}
        return AttentionModule(twin_of(self.module, args, kwargs, trained), trained)

    @property
    def gradients(self) -> dict[str, Tensor]:
        trained = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in trained.items()}

    def scores_at(self, step: Mapping[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> Tensor:
        """Run the whole model to get Y at other parameters of the module and the same inputs."""
        before = {n: p.detach().clone() for n, p in self.module.named_parameters()}
        try:
            with torch.no_grad(), monkeypatch.context() as patch:
                for name, parameter in self.module.named_parameters():
                    if name in step:
                        parameter += step[name]
                spy = Spy(patch)
                self.model(self.x)
                return spy.scores[-1].detach()
        finally:
            with torch.no_grad():
                for name, parameter in self.module.named_parameters():
                    parameter.copy_(before[name])


def scaled(direction: Mapping[str, Tensor], factor: float) -> dict[str, Tensor]:
    return {name: factor * tensor for name, tensor in direction.items()}


@pytest.fixture(params=MODELS)
def observed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Observed:
    return Observed(request.param, monkeypatch)


def test_moves_are_the_derivative_of_the_scores(
    observed: Observed, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(7)
    direction = {n: torch.randn_like(p) for n, p in observed.gradients.items()}
    randomness = torch.get_rng_state()
    [(call, move)] = moves_of_scores(observed.attends(), direction)
    assert torch.equal(torch.get_rng_state(), randomness)
    torch.testing.assert_close(call.query, observed.query, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(call.key, observed.key, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(call.output(), observed.output.detach(), rtol=1e-11, atol=1e-12)

    def difference(step: float) -> Tensor:
        ahead, back = (
            observed.scores_at(scaled(direction, sign * step), monkeypatch) for sign in (1, -1)
        )
        return (ahead - back) / (2 * step)

    # Richardson extrapolation: the error is of fourth order in the step.
    expected = (4 * difference(5e-5) - difference(1e-4)) / 3
    torch.testing.assert_close(
        call.change(move), expected, rtol=1e-8, atol=1e-8 * float(expected.abs().max())
    )


def test_attention_that_returns_its_weights_moves_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    observed = Observed("torch, mask", monkeypatch)
    attends = observed.attends([2, 0])
    weights = observed.attends([2, 0], need_weights=True)
    [(call, move)], [(same, again)] = (
        moves_of_scores(each, observed.gradients) for each in (attends, weights)
    )
    assert torch.equal(call.change(move), same.change(again))
    assert torch.equal(call.output(), same.output())


def test_score_gradients_of_models(observed: Observed) -> None:
    [(call, _)] = moves_of_scores(observed.attends([3, 1]), {})
    assert observed.output.grad is not None
    G = call.score_gradient(observed.output.grad[[3, 1]])(ALL)
    torch.testing.assert_close(G, observed.G[[3, 1]], rtol=1e-8, atol=1e-12)


def test_scores_ask_of_the_parameters_what_their_gradient_is(observed: Observed) -> None:
    """⟨e, G⟩ = ‖γ‖², and ⟨γ, u⟩ along any u, where γ is the gradient through the scores."""
    call, leaves = scores_with_graph(observed.attends())
    Y = call[0].query @ call[0].key.mT
    parts = torch.autograd.grad(Y, list(leaves.values()), observed.G, allow_unused=True)
    gamma = {n: g for n, g in zip(leaves, parts, strict=True) if g is not None}
    for name, part in gamma.items():  # here the whole gradient comes from the scores
        if name.startswith(("q_", "k_")):
            torch.testing.assert_close(part, observed.gradients[name], rtol=1e-8, atol=1e-12)
    [(attended, move)] = moves_of_scores(observed.attends(), gamma)
    assert observed.output.grad is not None
    keys = torch.zeros(*Y.shape[:3], 1, dtype=torch.int64)
    of = attended.score_gradient(observed.output.grad)
    _, e, _ = move_sums(attended, of, move, keys)
    whole = sum(float(part.square().sum()) for part in gamma.values())
    assert float(e.G.sum()) == pytest.approx(whole, rel=1e-8)


def test_sums_leave_idle_scores_out(observed: Observed, monkeypatch: pytest.MonkeyPatch) -> None:
    attends = observed.attends([3, 1])
    directions = {"d": scaled(observed.gradients, -0.3), "e": observed.gradients}
    moves = {}
    for name, direction in directions.items():
        [(call, moves[name])] = moves_of_scores(attends, direction)
    G = observed.G[[3, 1]]
    keys = torch.from_numpy(some_keys(*G.shape, 3, np.random.default_rng(0)))
    monkeypatch.setattr(scores, "CHUNK", 2 * G.shape[1] * G.shape[3])  # one query per chunk
    found = {m: move_sums(call, lambda t: G[:, :, t], move, keys) for m, move in moves.items()}
    for i, head in np.ndindex(*G.shape[:2]):
        expected = dict.fromkeys(moves, np.zeros(3))  # ‖g‖², ⟨ΔY, g⟩, ‖ΔY‖²
        for t, s in np.ndindex(*G.shape[2:]):
            g = float(G[i, head, t, s])
            if g == 0:
                continue
            change = {
                m: float(dq[i, head, t] @ call.key[i, head, s])
                + float(call.query[i, head, t] @ dk[i, head, s])
                for m, (dq, dk) in moves.items()
            }
            for m, y in change.items():
                expected[m] = expected[m] + (g * g, y * g, y * y)
        for m, (G_G, move, _) in found.items():
            sums = [float(x[i, head]) for x in (G_G, move.G, move.square)]
            assert sums == pytest.approx(expected[m], rel=1e-9, abs=1e-14)
    for _, _, active in found.values():
        for i, h, t, draw in np.ndindex(*keys.shape):
            s = int(keys[i, h, t, draw])
            assert bool(active[i, h, t, draw]) == (s >= 0 and bool(G[i, h, t, s] != 0))


# The scale of attention


def test_scale_is_the_square_of_each_scores_gradient(observed: Observed) -> None:
    attends = observed.attends([3, 1])
    [reached], leaves = scores_with_graph(attends)
    keys = some_keys(2, *observed.G.shape[1:], 2, np.random.default_rng(1))
    found, error = scales(reached, leaves, keys)
    assert error < 1e-9
    for i, head, t, draw in np.ndindex(*found.shape):
        s = keys[i, head, t, draw]
        score = reached.query[i, head, t] @ reached.key[i, head, s]
        gradients = torch.autograd.grad(
            score, list(leaves.values()), retain_graph=True, allow_unused=True
        )
        expected = sum(float(g.square().sum()) for g in gradients if g is not None)
        assert float(found[i, head, t, draw].detach()) == pytest.approx(expected, rel=1e-9)


def test_scale_of_plain_projections_is_the_one_of_the_spec(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The scale is ‖k_s‖²(‖x_t‖²+1) + ‖q_t‖²(‖x_s‖²+1), and rotating queries and keys keeps it."""
    # The transformers library keeps the sines of a rotation in float32.
    for name, bias, precision in (
        ("torch", 1, 1e-10),
        ("torch, no bias", 0, 1e-10),
        ("llama", 0, 1e-7),
    ):
        observed = Observed(name, monkeypatch)
        attends = observed.attends()
        [reached], leaves = scores_with_graph(attends)
        keys = some_keys(*observed.G.shape, 1, np.random.default_rng(2))
        found, _ = scales(reached, leaves, keys)
        args, kwargs = of_samples(observed.module, *observed.inputs[0], torch.arange(4))
        given = {**dict(zip(("query", "key"), args, strict=False)), **kwargs}
        x_q, x_k = (
            given[n].square().sum(-1) + bias
            for n in (("query", "key") if name != "llama" else ("hidden_states",) * 2)
        )
        q, k = observed.query.square().sum(-1), observed.key.square().sum(-1)
        for i, h, t in np.ndindex(*found.shape[:3]):
            s = keys[i, h, t, 0]
            expected = k[i, h, s] * x_q[i, t] + q[i, h, t] * x_k[i, s]
            torch.testing.assert_close(found[i, h, t, 0], expected, rtol=precision, atol=0)


def test_scale_says_where_rows_do_not_explain_it() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qk = nn.Linear(4, 4)

        def forward(self, x: Tensor, mix: bool) -> Tensor:
            q, k = self.qk(x), self.qk(x)
            q = q.cumsum(1) if mix else q
            return functional.scaled_dot_product_attention(q[:, None], k[:, None], x[:, None])

    module = Shared().double()
    for mix in (False, True):
        inputs = (tensors((2, 3, 4))[0], mix)
        named = dict(module.named_parameters())
        attends = AttentionModule(twin_of(module, inputs, {}, named), named)
        [reached], leaves = scores_with_graph(attends)
        keys = some_keys(2, 1, 3, 3, 3, np.random.default_rng(0))
        found, error = scales(reached, leaves, keys)
        # A shared weight is no sum over rows; where tokens are mixed, no row belongs to one token.
        assert found.isnan().all() if mix else not error <= 0.01


def test_a_module_without_attention_is_told() -> None:
    module = nn.Linear(3, 3)
    named = dict(module.named_parameters())
    attends = AttentionModule(twin_of(module, (torch.ones(2, 3),), {}, named), named)
    with pytest.raises(Refused, match=r"Linear: got 0 calls .* expected 1"):
        moves_of_scores(attends, {})


class Gain(torch.autograd.Function):
    """The function 3x, without a forward-mode derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 3 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 3 * gradient


def test_functions_before_the_scores_need_no_forward_mode_derivative() -> None:
    class Own(nn.Module):
        def __init__(self, gain: Callable[[Tensor], Tensor]) -> None:
            super().__init__()
            self.q, self.k, self.gain = nn.Linear(4, 4), nn.Linear(4, 4), gain

        def forward(self, x: Tensor) -> Tensor:
            q, k = self.gain(self.q(x)), self.k(x)
            return functional.scaled_dot_product_attention(q[:, None], k[:, None], x[:, None])

    x = tensors((2, 3, 4))[0]
    plain, custom = Own(lambda q: 3 * q).double(), Own(Gain.apply).double()
    custom.load_state_dict(plain.state_dict())
    named, other = dict(plain.named_parameters()), dict(custom.named_parameters())
    direction = {"q.weight": named["q.weight"].detach().cos()}
    [(call, move)], [(same, again)] = (
        moves_of_scores(AttentionModule(twin_of(m, (x,), {}, p), p), direction)
        for m, p in ((plain, named), (custom, other))
    )
    assert torch.equal(call.query, same.query)
    change = call.change(move)
    assert change.abs().max() > 0
    torch.testing.assert_close(same.change(again), change, rtol=1e-12, atol=1e-14)


def test_each_row_of_scores_has_its_keys_sampled_without_repetition() -> None:
    generator = np.random.default_rng(0)
    for queries, keys in ((4, 4), (3, 5), (5, 3)):
        size = max(queries, keys)
        every = some_keys(2, 2, queries, keys, 9, generator)
        for of_head in every.reshape(4, queries, size):
            pairs = [(t, s) for t, row in enumerate(of_head) for s in row if s >= 0]
            assert sorted(pairs) == list(np.ndindex(queries, keys))
        chosen = some_keys(1_000, 3, queries, keys, 2, generator)
        assert chosen.shape == (1_000, 3, queries, 2)
        for draw in np.moveaxis(chosen, 3, 2).reshape(-1, queries):
            seen = draw[draw >= 0]
            assert len(seen) == min(queries, keys) == len(set(seen))
        counts = np.array(
            [[(chosen[:, :, t] == s).sum() for s in range(keys)] for t in range(queries)]
        )
        expected = 6_000 / size
        assert np.abs(counts - expected).max() < 5 * np.sqrt(expected)


# The measures


def made_up(samples: int, heads: int = 3) -> tuple[AttentionSums[Array], np.ndarray, np.ndarray]:
    """Return sums of random scores, the scores (samples, heads, scores), and scales."""
    draw = np.random.default_rng(0)
    G = draw.normal(size=(samples, heads, 40)) * draw.uniform(0.5, 1.5, (samples, 1, 1))
    G[:, :, ::7] = 0
    d = np.where(G != 0, G + 2 * draw.normal(size=G.shape), 0)
    e = np.where(G != 0, G + draw.normal(size=G.shape), 0)
    D = draw.uniform(1, 3, G.shape) * (1 + np.arange(heads))[:, None]
    none = np.array(0.0)
    sums = AttentionSums(
        samples=samples,
        G_G=(G * G).sum(2),
        e=MoveSums((e * G).sum(2), (e * e).sum(2)),
        errors=RerunErrors(none, none, none, 1e-16),
        d=MoveSums((d * G).sum(2), (d * d).sum(2)),
        scale=scales_of(D[..., None], G[..., None] != 0),
    )
    return sums, np.stack([G, d, e]), D


def scales_of(scale: np.ndarray, active: np.ndarray) -> ScaleSums[Array]:
    error = torch.zeros((), dtype=torch.float64)
    made = scale_sums(torch.from_numpy(scale), torch.from_numpy(active), error, 1.0)
    return with_numbers(cast("ScaleSums[Array]", made), [x.numpy() for x in numbers_of(made)])


def test_measures_over_all_samples_are_exact() -> None:
    sums, (G, d, e), D = made_up(5)
    reading = attention_reading(sums)

    def cosine(a: np.ndarray, b: np.ndarray) -> float:
        return float((a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b))

    def expected(part: Any) -> dict[str, float]:
        scale = D[part][G[part] != 0]
        return {
            "attention_cosine": cosine(d[part], G[part]),
            "attention_gradient_cosine": cosine(e[part], G[part]),
            "attention_scale_mean": float(scale.mean()),
            "attention_scale_cv": float(scale.std() / scale.mean()),
        }

    assert reading.measures() == pytest.approx(expected(np.s_[:]), rel=1e-12)
    for head in range(3):
        found = {name: values[head] for name, values in reading.heads.items()}
        assert found == pytest.approx(expected(np.s_[:, head]), rel=1e-12)
    assert not reading.standard_error
    assert sums.scale is not None
    some = attention_reading(replace(sums, scale=replace(sums.scale, share=0.5)))
    assert set(some.standard_error) == {"attention_scale_mean", "attention_scale_cv"}
    assert (reading.samples_seen, reading.samples_total) == (5, 5)


def test_errors_of_sampled_measures_are_what_they_say() -> None:
    total, seen = 400, 24
    sums, _, _ = made_up(total)
    truth = attention_reading(sums)
    deviations: dict[str, list[float]] = {name: [] for name in truth.measures()}
    draw = np.random.default_rng(1)
    for _ in range(300):
        chosen = draw.choice(total, seen, replace=False)
        reading = attention_reading(map_samples(sums, partial(np.take, indices=chosen, axis=0)))
        for name, value in reading.measures().items():
            error = reading.standard_error[name]
            deviations[name].append((value - truth.measures()[name]) / error)
    for name, values in deviations.items():
        assert 0.85 < np.std(values) < 1.25, name
        assert abs(np.mean(values)) < 0.25, name


def test_measures_that_were_not_taken_are_absent() -> None:
    sums = replace(made_up(4)[0], samples=9)
    reading = attention_reading(replace(sums, d=None, scale=None))
    assert set(reading.measures()) == {"attention_gradient_cosine"} == set(reading.heads)
    alone = attention_reading(map_samples(sums, lambda x: x[:1]))
    assert np.isnan(alone.standard_error["attention_scale_mean"]), "one sample can't tell"
    idle = attention_reading(map_samples(sums, np.zeros_like))
    assert all(np.isnan(v) for v in idle.measures().values())


def test_equal_scales_have_no_spread() -> None:
    same = np.full((4, 2, 5, 1), 0.1 + 0.2, dtype=np.float32)
    scale = scales_of(same, np.ones(same.shape, dtype=bool))
    reading = attention_reading(replace(made_up(4, heads=2)[0], scale=scale))
    assert reading.attention_scale_cv == pytest.approx(0, abs=1e-6)


def test_parts_of_the_samples_merge_to_the_sums_of_all() -> None:
    sums, _, _ = made_up(7)
    parts = [map_samples(sums, lambda x, part=part: x[part]) for part in (slice(3), slice(3, 7))]
    assert parts[1].scale is not None
    off = 0.7  # the second part's scales have another offset
    shifted = replace(
        parts[1].scale,
        pivot=parts[1].scale.pivot - off,
        sum=parts[1].scale.sum + off * parts[1].scale.count,
        square=parts[1].scale.square + 2 * off * parts[1].scale.sum + off**2 * parts[1].scale.count,
    )
    merged = merge([replace(parts[0], samples=3), replace(parts[1], samples=4, scale=shifted)])
    assert merged.samples == 7
    for found, expected in zip(numbers_of(merged), numbers_of(sums), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_what_one_part_does_not_know_is_not_known_of_all() -> None:
    sums, _, _ = made_up(3)
    coarse = replace(sums.errors, precision=1e-3)
    other = replace(sums, d=None, scale=None, no_scale="why", errors=coarse)
    assert sums.scale is not None
    worse = replace(
        sums,
        errors=replace(sums.errors, key=np.array(0.5)),
        scale=replace(sums.scale, share=0.25),
    )
    whole = merge([sums, other, worse])
    assert whole.d is None and whole.scale is None
    assert (whole.no_scale, whole.errors.precision, whole.samples) == ("why", 1e-3, 9)
    assert [float(error) for error in numbers_of(whole.errors)] == [0, 0.5, 0]
    known = merge([sums, worse]).scale
    assert known is not None and known.share == 0.25
