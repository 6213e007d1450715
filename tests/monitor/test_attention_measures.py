"""Readings of attention in monitored runs agree with explicitly computed scores."""

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attending import Spy
from torch import Tensor, nn
from torch.func import jacrev, jvp
from torch.nn import functional
from zoo import ZOO
from zoo.runs import run

from adiv_monitor import Monitor, StepReport
from adiv_monitor.maths import scores
from adiv_monitor.report import ATTENTION_MEASURES

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # by jvp


class Attends(nn.Module):
    """A layer followed by torch's own attention.

    Args:
        cross: attend to a memory with more tokens.
        call: further arguments of the attention's forward.
        options: of the attention.
    """

    def __init__(self, cross: bool = False, call: dict[str, Any] | None = None, **options: Any):
        super().__init__()
        self.before = nn.Linear(6, 6)
        self.attention = nn.MultiheadAttention(6, 3, batch_first=True, **options)
        self.cross = cross
        self.call = {"need_weights": False} | (call or {})

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        memory = torch.cat([x.flip(1), x[:, :3].sin()], 1) if self.cross else x
        call = dict(self.call)
        if "key_padding_mask" in call:
            call["key_padding_mask"] = call["key_padding_mask"][: len(x)]
        output: Tensor = self.attention(x, memory, memory[..., : self.attention.vdim], **call)[0]
        return output


def padding(keys: int) -> Tensor:
    mask = torch.zeros(4, keys, dtype=torch.bool)
    mask[1, 4:] = True
    mask[3, 2] = True
    return mask


def attends(**options: Any) -> Callable[[], nn.Module]:
    return lambda: Attends(**options)


CAUSAL = torch.ones(6, 6, dtype=torch.bool).triu(1)
BUILD: dict[str, Callable[[], nn.Module]] = {
    "torch": attends(),
    "torch, cross": attends(cross=True, vdim=2),
    "torch, padding": attends(call={"key_padding_mask": padding(6)}),
    "torch, causal": attends(call={"attn_mask": CAUSAL, "is_causal": True}),
}


def built(name: str) -> nn.Module:
    torch.manual_seed(3)
    model = BUILD[name]().double().train()
    for parameter in model.parameters():  # so that no gain is 1 and no bias 0
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def batch(samples: int = 4) -> Tensor:
    torch.manual_seed(4)
    return torch.randn(samples, 6, 6, dtype=torch.float64)


def judged(output: Tensor) -> Tensor:
    return (output * torch.linspace(-1, 1, 6, dtype=output.dtype)).sin().square().sum()


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return judged(model(x))


def monitored(
    model: nn.Module,
    x: Tensor | None = None,
    step: Callable[[nn.Module, torch.optim.Optimizer], object] | None = None,
    **options: Any,
) -> StepReport:
    """Return the report of one step with attention measured."""
    x = batch() if x is None else x
    stepping = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"attention": True, "loss": judged, "on_error": "raise", **options}
    with Monitor(model, stepping, **given) as monitor:
        torch.manual_seed(5)
        if step is None:
            loss_of(model, x).backward()
        else:
            step(model, stepping)
        stepping.step()
    return monitor.latest


def of_scores(G: Tensor, d: Tensor, e: Tensor, D: Tensor) -> dict[str, float]:
    asks = G != 0
    G, d, e, D = G[asks], d[asks], e[asks], D[asks]
    return {
        "attention_cosine": float(d @ G / d.norm() / G.norm()),
        "attention_gradient_cosine": float(e @ G / e.norm() / G.norm()),
        "attention_scale_mean": float(D.mean()),
        "attention_scale_cv": float(D.std(correction=0) / D.mean()),
    }


# Calls, samples and passes


@pytest.fixture
def plain() -> StepReport:
    return monitored(built("torch, causal"))


def same(report: StepReport, expected: StepReport, precision: float = 1e-8) -> None:
    assert report.attention.keys() == expected.attention.keys()
    for path, reading in report.attention.items():
        measures = expected.attention[path].measures()
        assert reading.measures() == pytest.approx(measures, rel=precision, abs=1e-12)
        for name, values in expected.attention[path].heads.items():
            assert reading.heads[name] == pytest.approx(values, rel=precision, abs=1e-12)


def test_calls_of_one_attention_are_taken_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with its own inputs held fixed, though the first makes those of the second."""
    block = Attends()
    model = nn.Sequential(block, block).double()
    twin, given = copy.deepcopy(model), list[Tensor]()
    twin[0].attention.register_forward_pre_hook(lambda m, args: given.append(args[0]))
    with monkeypatch.context() as patch:
        spy = Spy(patch)
        loss_of(twin, batch()).backward()
    attention = twin[0].attention
    before = {n: p.detach() for n, p in attention.named_parameters()}

    def scores(p: dict[str, Tensor]) -> Tensor:
        def part(x: Tensor, i: int) -> Tensor:
            weight, bias = (p[f"in_proj_{name}"].chunk(3)[i] for name in ("weight", "bias"))
            return (x @ weight.mT + bias).unflatten(-1, (3, -1)).transpose(1, 2)

        return torch.cat([part(x.detach(), 0) @ part(x.detach(), 1).mT for x in given])

    e = jvp(scores, (before,), ({n: p.grad for n, p in attention.named_parameters()},))[1]
    D = sum(j.flatten(4).square().sum(-1) for j in jacrev(scores)(before).values())
    G = torch.cat([y.grad for y in spy.scores])
    [reading] = monitored(model).attention.values()
    assert reading.samples_seen == 8
    expected = of_scores(G, e, e, D)
    found = {name: reading.measures()[name] for name in expected}
    assert found == pytest.approx(expected, rel=1e-8, abs=1e-12)


def read_of(q: Tensor, k: Tensor, sees: Tensor) -> dict[str, float]:
    """Return the largest logit and norms, and the means over queries, one after the other."""
    norms = (max(of.flatten(0, 2).norm(dim=1).tolist()) for of in (q, k))
    entropies, firsts, largest = [], [], -math.inf
    for n, h, t in itertools.product(*map(range, q.shape[:3])):
        keys = [s for s in range(k.shape[2]) if sees.expand(len(q), 1, -1, -1)[n, 0, t, s]]
        if len(keys) < 2:
            continue
        logits = [float(q[n, h, t] @ k[n, h, s]) / q.shape[-1] ** 0.5 for s in keys]
        whole = sum(map(math.exp, logits))
        P = [math.exp(logit) / whole for logit in logits]
        largest = max(largest, *logits)
        entropies.append(-sum(p * math.log(p) for p in P) / math.log(len(P)))
        firsts.append(P[0] if keys[0] == 0 else 0.0)
    means = (sum(x) / len(x) for x in (entropies, firsts))
    step = largest * torch.finfo(q.dtype).eps
    return dict(zip(SPREAD, (largest, step, *norms, *means), strict=True))


SPREAD = (
    *("attention_logit_max", "attention_logit_step", "attention_query_norm", "attention_key_norm"),
    *("attention_entropy", "attention_first_share"),
)


@pytest.mark.slow(one_in=4)
@pytest.mark.parametrize("name", BUILD)
def test_where_attention_looks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, chunk = built(name), 50
    with monkeypatch.context() as patch:
        spy = Spy(patch)
        copy.deepcopy(model)(batch())
    (q,), (k,) = spy.queries, spy.keys
    sees = torch.ones(1, 1, *q.shape[2:3], k.shape[2], dtype=torch.bool)
    if "padding" in name:
        sees = sees & ~padding(6)[:, None, None]
    if "causal" in name:
        sees = sees & ~CAUSAL
    monkeypatch.setattr(scores, "CHUNK", chunk)  # some queries at a time
    report = monitored(model)
    [reading] = report.attention.values()
    assert len(report.layers) == 5, "before, q, k, v, out_proj"
    for measure, value in read_of(q, k, sees).items():
        assert getattr(reading, measure) == pytest.approx(value, rel=1e-9)
        of_heads = [read_of(q[:, h : h + 1], k[:, h : h + 1], sees)[measure] for h in range(3)]
        assert reading.heads[measure] == pytest.approx(of_heads, rel=1e-9)
        assert measure not in reading.standard_error


def test_dropout_is_off() -> None:
    """The scores, their gradient and their moves are those of evaluation mode."""
    model = built("torch")
    dropped, gradients = copy.deepcopy(model), copy.deepcopy(model)
    dropped.attention.dropout = 0.3
    loss_of(gradients, batch()).backward()

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        loss_of(model, batch()).backward()
        for mine, p in zip(model.parameters(), gradients.parameters(), strict=True):
            mine.grad = p.grad

    same(monitored(dropped, step=step), monitored(model, step=step))


def test_the_first_eight_samples_of_the_first_forward_pass_are_the_probe() -> None:
    gradients = built("torch, causal")
    parts = batch(20).split([12, 8])
    for part in parts:
        loss_of(gradients, part).backward()

    def accumulated(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for part in parts:
            loss_of(model, part).backward()

    def alone(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        loss_of(model, batch(20)[:8]).backward()
        for mine, p in zip(model.parameters(), gradients.parameters(), strict=True):
            mine.grad = p.grad

    found, expected = (monitored(built("torch, causal"), step=s) for s in (accumulated, alone))
    assert found.attention["attention"].samples_seen == 8
    same(found, expected)


def test_without_a_loss_the_scale_alone_is_known(plain: StepReport) -> None:
    report = monitored(built("torch, causal"), loss=None)
    [reading], [known] = report.attention.values(), plain.attention.values()
    scales = {"attention_scale_mean", "attention_scale_cv"}
    assert set(reading.measures()) == {*scales, *SPREAD}
    # A query that sees one key asks nothing of its score, and counts only where g is not known.
    assert reading.attention_scale_mean == pytest.approx(known.attention_scale_mean, rel=0.3)
    (note,) = report.notes
    assert "cosines of attention are missing: they need the loss" in note


def test_without_an_optimizer_there_is_what_the_gradient_says(plain: StepReport) -> None:
    model = built("torch, causal")
    with Monitor(model, None, attention=True, loss=judged, on_error="raise") as monitor:
        loss_of(model, batch()).backward()
        monitor.end_step()
    [reading], [expected] = monitor.latest.attention.values(), plain.attention.values()
    assert "attention_cosine" not in reading.measures()
    assert reading.attention_gradient_cosine == pytest.approx(expected.attention_gradient_cosine)


def test_half_precision_reads_what_single_does() -> None:
    def autocast(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, batch().float())
        loss.backward()

    def half(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        loss_of(model, batch().bfloat16()).backward()

    single = monitored(built("torch").float(), batch().float())
    for dtype, step in ((torch.float32, autocast), (torch.bfloat16, half)):
        report = monitored(built("torch").to(dtype), step=step)
        assert not [note for note in report.notes if "ttention" in note]
        [reading], [expected] = report.attention.values(), single.attention.values()
        # The update is computed from rounded weights.
        but = {"attention_cosine"} if dtype == torch.bfloat16 else set()
        but |= {"attention_logit_step"}  # both run attention in bfloat16, whose last digit is 2⁻⁷
        largest = reading.attention_logit_max
        assert reading.attention_logit_step == pytest.approx(largest * 2**-7, rel=1e-6)
        for measure in expected.measures().keys() - but:
            value = getattr(reading, measure)
            assert value == pytest.approx(getattr(expected, measure), rel=0.05)


# Unmeasurable attention, and forbidden side effects


class Own(nn.Module):
    """Attention of one head between queries and keys that pass through a function."""

    def __init__(self, changed: Callable[[Tensor], Tensor], shared: bool = False) -> None:
        super().__init__()
        self.q = nn.Linear(6, 6)
        self.k = self.q if shared else nn.Linear(6, 6)
        self.changed = changed

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.changed(self.q(x)), self.k(x)
        return functional.scaled_dot_product_attention(q[:, None], k[:, None], x[:, None])[:, 0]


class Twice(nn.Module):
    """A module whose forward calls attention twice, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        attend = functional.scaled_dot_product_attention
        x = attend(self.q(x)[:, None], self.k(x)[:, None], x[:, None])[:, 0]
        return attend(self.q(x)[:, None], self.k(x)[:, None], x[:, None])[:, 0]


class Fails(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2:
            raise KeyError("second")
        return x


class Once(torch.autograd.Function):
    """The identity, whose backward can't be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class Reduced(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.detach().clone()
        torch.distributed.all_reduce(y)
        return x + y


def test_nothing_waits_for_other_processes() -> None:
    """Readings that need no other rank are made: the others may not measure this step."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        waits = monitored(nn.Sequential(Own(Reduced())).double())
        alone = monitored(built("torch"))
    finally:
        torch.distributed.destroy_process_group()
    assert not waits.attention
    assert any("would wait for the other ranks" in note for note in waits.notes)
    same(alone, monitored(built("torch")))


def test_the_scale_of_a_weight_in_common_is_known() -> None:
    """Of queries and keys: ∂Y_ts/∂W = k_s x_tᵀ + q_t x_sᵀ, and ∂Y_ts/∂b = k_s + q_t."""
    model = nn.Sequential(Own(nn.Identity(), shared=True)).double()
    x = batch()
    z = model[0].q(x).detach()
    of_bias = z[:, None] + z[:, :, None]
    of_weight = torch.einsum("nsi,ntj->ntsij", z, x) + torch.einsum("nti,nsj->ntsij", z, x)
    D = of_weight.square().sum((3, 4)) + of_bias.square().sum(3)
    [reading] = monitored(model, x).attention.values()
    assert reading.attention_scale_mean == pytest.approx(D.mean().item(), rel=1e-9)


ATTENDING = ("gpt2", "t5", "whisper", "hf_vit", "transformer")


@pytest.mark.slow(one_in=8)
@pytest.mark.parametrize("name", ATTENDING)
def test_the_run_is_the_unmonitored_one(name: str) -> None:
    ours = run(ZOO[name], monitored=True, attention=True)
    ours.assert_same(run(ZOO[name], monitored=False))
    [reports] = ours.reports
    for report in reports:
        assert report.attention
        (note,) = (note for note in report.notes if "ttention" in note)
        assert "cosines of attention are missing" in note
    for reading in reports[-1].attention.values():
        without = {"attention_cosine", "attention_gradient_cosine"}
        assert reading.measures().keys() == {*ATTENTION_MEASURES} - without
        assert all(map(math.isfinite, reading.measures().values()))


# Output to sinks


class Unseen(Own):
    """Attention that the loss does not see, beside a layer."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + 0 * super().forward(x).detach()


class Adapted(Own):
    """Attention that trains its values alone."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())
        self.requires_grad_(False)
        self.v = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x)[:, None] for part in (self.q, self.k, self.v))
        return functional.scaled_dot_product_attention(q, k, v)[:, 0]


def broken() -> nn.Module:
    model = Attends()
    with torch.no_grad():
        model.attention.in_proj_weight[0, 0] = math.nan
    return model


NO_READING: dict[str, Callable[[], nn.Module]] = {
    "derivative for aten::_scaled_dot_product": Twice,  # of the second; the first has a reading
    "KeyError: 'second'": lambda: Own(Fails()),
    "differentiate": lambda: Own(Once.apply),
    "is not measured: no gradient reached it in this step.": Unseen,
    "queries or keys are not finite": broken,
    "no trained parameter makes its queries or keys": Adapted,
    "No attention of trained weights was seen": lambda: nn.Linear(6, 6),
}


@pytest.mark.filterwarnings("ignore:adiv_monitor. step 0. not finite")
@pytest.mark.parametrize("reason", NO_READING)
def test_what_has_no_reading_is_said_and_the_rest_is_measured(reason: str) -> None:
    torch.manual_seed(0)
    model = NO_READING[reason]()
    report = monitored(nn.Sequential(model).double(), batch(10), on_error="warn")
    assert len(report.attention) == isinstance(model, Twice)
    assert any(reason in note for note in report.notes)
    assert report.layers and (report.coverage == 1 or isinstance(model, Unseen))
