"""What-if agrees with the monitor where that can tell, and with the definitions elsewhere."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from adiv_layers import convert
from torch import Tensor, nn
from torch.nn import functional
from trial_setups import batches, cnn, images, loss, sgd

from adiv_monitor import Monitor
from adiv_monitor.audit.training.setup import Setup, seeded
from adiv_monitor.audit.what_if import what_if
from adiv_monitor.diagnosis.record import Alternative

NAMES = {
    "as it is",
    "affine-like",
    "norm-like",
    "layer norm",
    "rms norm",
    "batch norm",
    "centred inputs",
    "constant scale",
    "rate per layer",
}


def sequences() -> nn.Module:
    """A model of tokens with linear layers, one of which is called twice, behind dropout."""
    torch.manual_seed(3)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.twice = nn.Linear(5, 6), nn.Linear(6, 6, bias=False)
            self.last = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden = functional.dropout(self.first(x), 0.5, self.training).relu_()
            return self.last(self.twice(self.twice(input=hidden).tanh()).mean(1))

    return Twice()


CASES = {
    "mlp": lambda: (
        nn.Sequential(nn.Linear(12, 7), nn.Tanh(), nn.Linear(7, 3, bias=False)),
        batches(1),
    ),
    "cnn": lambda: (cnn(), images(1)),
    "sequences": lambda: (sequences(), ((torch.randn(6, 4, 5), torch.randint(3, (6,))),)),
}


def exact(case: str) -> Setup:
    model, data = CASES[case]()
    (x, y), *_ = data
    return Setup(model.double(), sgd(lr=1.0), loss, ((x.double(), y),), steps=1)


def measured(setup: Setup) -> dict[str, Any]:
    """Return the monitor's readings of the first step, from all rows."""
    fork = setup.fork()
    with Monitor(fork.model, fork.optimizer, max_rows=None, on_error="raise") as monitor:
        with seeded(setup.seed):
            fork.loss(fork.model, fork.batches[0]).backward()
        fork.optimizer.step()
    return dict(monitor.latest.layers)


def agrees(found: Alternative, reading: Any) -> None:
    assert found.gradient_cosine == pytest.approx(reading.gradient_cosine, abs=1e-6)
    assert found.scale_cv == pytest.approx(reading.scale_cv, abs=1e-6)
    assert found.effective_lr == pytest.approx(reading.effective_lr, rel=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_as_it_is_agrees_with_the_monitor(case: str) -> None:
    setup = exact(case)
    found, readings = what_if(setup), measured(setup)
    assert set(found) == set(readings)
    for path, alternatives in found.items():
        assert set(alternatives) == NAMES
        agrees(alternatives["as it is"], readings[path])


def held(module: nn.Module, x: Tensor, G: Tensor) -> Setup:
    """A layer that receives the gradients G, whatever its map."""
    model = nn.Sequential(module)
    return Setup(model, sgd(lr=1.0), lambda m, batch: (m(batch[0]) * batch[1]).sum(), ((x, G),), 1)


LAYERS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "linear": lambda: (nn.Linear(5, 4), torch.randn(9, 5)),
    "no bias": lambda: (nn.Linear(5, 4, bias=False), torch.randn(3, 4, 5)),
    "convolution": lambda: (nn.Conv2d(2, 4, 3, padding=1), torch.randn(3, 2, 5, 5) + 1),
    "groups": lambda: (nn.Conv1d(4, 6, 2, stride=2, groups=2), torch.randn(3, 4, 7) + 1),
    "unbatched": lambda: (nn.Conv1d(4, 6, 2), torch.randn(4, 7)),
    "reflected": lambda: (
        nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect"),
        torch.randn(3, 2, 5, 5),
    ),
}


@pytest.fixture(params=LAYERS)
def one(request: pytest.FixtureRequest) -> Setup:
    module, x = LAYERS[request.param]()
    module, x = module.double(), x.double()
    return held(module, x, torch.randn_like(module(x)))


@pytest.mark.parametrize("name", ["affine-like", "norm-like"])
def test_other_maps_agree_with_the_monitor_on_the_converted_layer(one: Setup, name: str) -> None:
    found = what_if(one)["0"][name]
    assert convert(one.model, name).swapped
    agrees(found, measured(one)["0"])


def test_norms_agree_with_the_monitor_behind_torchs_own() -> None:
    module, x = nn.Linear(5, 4).double(), 3 * torch.randn(9, 5).double() + 1
    setup = held(module, x, torch.randn(9, 4).double())
    found = what_if(setup)["0"]
    for name, norm in {
        "layer norm": nn.LayerNorm(5, elementwise_affine=False),
        "rms norm": nn.RMSNorm(5, elementwise_affine=False),
        "batch norm": nn.BatchNorm1d(5, affine=False),
    }.items():
        behind = held(nn.Sequential(norm.double(), module), x, setup.batches[0][1])
        agrees(found[name], measured(behind)["0.1"])


def dense(features: Tensor, G: Tensor) -> Alternative:
    """Compute the measures from their definitions, with M = ΦΦᵀ as a matrix."""
    M = features @ features.t()
    e, scale = M @ G, M.diagonal()
    return Alternative(
        float((e * G).sum() / e.norm() / G.norm()),
        float(scale.std(correction=0) / scale.mean()),
        float((e * G).sum() / G.norm() ** 2),
    )


def same(found: Alternative, expected: Alternative) -> None:
    for name in ("gradient_cosine", "scale_cv", "effective_lr"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), abs=1e-9, rel=1e-9)


def patches(module: nn.Module, x: Tensor) -> Tensor:
    """Return the rows of a linear layer or of a two-dimensional convolution."""
    if isinstance(module, nn.Linear):
        return x.flatten(0, -2)
    unfolded = functional.unfold(x, module.kernel_size, padding=module.padding)
    return unfolded.movedim(1, -1).flatten(0, 1)


@pytest.mark.parametrize("name", ["linear", "convolution"])
def test_centred_inputs_have_centred_features(name: str) -> None:
    module, x = LAYERS[name]()
    module, x = module.double(), x.double() + 5
    G = torch.randn_like(module(x))
    rows = patches(module, x)
    found = what_if(held(module, x, G))["0"]
    g = G if name == "linear" else G.movedim(1, -1).flatten(0, -2)
    one = torch.ones(len(rows), 1).double()
    same(found["as it is"], dense(torch.cat([rows, one], 1), g))
    same(found["centred inputs"], dense(torch.cat([rows - rows.mean(0), one], 1), g))


def test_centred_patches_of_groups() -> None:
    """Two groups are two layers: M is one matrix for each."""
    module, x = nn.Conv2d(4, 6, 3, groups=2).double(), torch.randn(3, 4, 5, 5).double() + 2
    G = torch.randn_like(module(x))
    found = what_if(held(module, x, G))["0"]["centred inputs"]
    e, scales = [], []
    for group in range(2):
        rows = functional.unfold(x[:, 2 * group : 2 * group + 2], 3).movedim(1, -1).flatten(0, 1)
        phi = torch.cat([rows - rows.mean(0), torch.ones(len(rows), 1)], 1)
        g = G[:, 3 * group : 3 * group + 3].movedim(1, -1).flatten(0, -2)
        e.append(phi @ phi.t() @ g)
        scales.append(phi.square().sum(1))
    g, scale = G.movedim(1, -1).flatten(0, -2), torch.stack(scales)
    moved = torch.cat(e, 1)
    assert found.gradient_cosine == pytest.approx(
        float((moved * g).sum() / moved.norm() / g.norm()), abs=1e-9
    )
    assert found.scale_cv == pytest.approx(float(scale.std(correction=0) / scale.mean()), abs=1e-9)


def test_a_constant_scale_changes_the_effective_rate_alone(one: Setup) -> None:
    found = what_if(one)["0"]
    as_is, scaled = found["as it is"], found["constant scale"]
    assert (scaled.gradient_cosine, scaled.scale_cv) == (as_is.gradient_cosine, as_is.scale_cv)
    ratio = as_is.effective_lr / scaled.effective_lr
    assert ratio == pytest.approx(measured(one)["0"].scale_mean, rel=1e-9)


def test_a_rate_per_layer_evens_out_the_effective_rates() -> None:
    found = what_if(exact("cnn"))
    assert len({f["rate per layer"].effective_lr for f in found.values()}) == 1
    rates = sorted(f["as it is"].effective_lr for f in found.values())
    assert found["0"]["rate per layer"].effective_lr == rates[1]


def test_corrected_maps_have_no_spread() -> None:
    found = what_if(exact("mlp"))["0"]
    assert found["as it is"].scale_cv > 0.2
    assert found["affine-like"].scale_cv == pytest.approx(0, abs=1e-9)
    assert found["norm-like"].scale_cv == pytest.approx(0, abs=1e-9)


def test_uncentred_inputs_gain_most_by_centring() -> None:
    """Spec, "The mean feature": MLP input .21 → .58, norm-like .23; the same in kind."""
    setup = exact("mlp")
    x, y = setup.batches[0]
    far = Setup(setup.model, setup.optimizer, loss, ((x + 5, y),), 1)
    found = what_if(far)["0"]
    as_is, centred, norm_like = (
        found[n].gradient_cosine for n in ("as it is", "centred inputs", "norm-like")
    )
    assert centred > as_is + 0.2
    assert abs(norm_like - as_is) < 0.1


def test_idle_rows_count_for_nothing() -> None:
    module, x = nn.Linear(5, 4).double(), torch.randn(9, 5).double()
    G = torch.randn(9, 4).double()
    G[5:] = 0
    setup = held(module, x, G)
    agrees(what_if(setup)["0"]["as it is"], measured(setup)["0"])
    shorter = held(module, x[:5], G[:5])
    same(what_if(setup)["0"]["as it is"], what_if(shorter)["0"]["as it is"])


def test_frozen_bias_is_not_stepped() -> None:
    module, x = nn.Linear(5, 4).double(), torch.randn(9, 5).double()
    module.bias.requires_grad_(False)
    setup = held(module, x, torch.randn(9, 4).double())
    found = what_if(setup)["0"]
    agrees(found["as it is"], measured(setup)["0"])
    rows = x - x.mean(0)
    same(found["centred inputs"], dense(rows, setup.batches[0][1]))


def test_what_is_no_plain_layer_is_left_out() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(9, 4)
            self.tied = nn.Linear(4, 9, bias=False)
            self.tied.weight = self.embedding.weight
            self.frozen = nn.Linear(4, 4).requires_grad_(False)
            self.unused = nn.Linear(4, 4)
            self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
            self.plain = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.tied(self.plain(self.normed(self.frozen(self.embedding(x)))))

    data = ((torch.arange(9), torch.arange(9)),)
    assert set(what_if(Setup(Odd(), sgd(), loss, data, 1))) == {"plain"}


def test_one_row_has_no_batch_norm() -> None:
    setup = held(nn.Linear(5, 4), torch.randn(1, 5), torch.randn(1, 4))
    found = what_if(setup)["0"]
    assert set(found) == NAMES - {"batch norm"}
    assert found["as it is"].gradient_cosine == pytest.approx(1, abs=1e-6)


def test_half_precision_is_reckoned_in_single() -> None:
    torch.manual_seed(0)
    module, x = nn.Linear(5, 4).bfloat16(), torch.randn(9, 5).bfloat16()
    setup = held(module, x, torch.randn(9, 4).bfloat16())
    found = what_if(setup)["0"]["as it is"]
    G = setup.batches[0][1].double()
    expected = dense(torch.cat([x.double(), torch.ones(9, 1).double()], 1), G)
    assert found.gradient_cosine == pytest.approx(expected.gradient_cosine, abs=1e-6)


def test_the_model_stays_as_it_is() -> None:
    setup = exact("cnn")
    before = [p.clone() for p in setup.model.parameters()]
    state = torch.get_rng_state()
    what_if(setup)
    assert torch.equal(torch.get_rng_state(), state)
    for now, then in zip(setup.model.parameters(), before, strict=True):
        assert torch.equal(now, then) and now.grad is None
    assert not any(m._forward_hooks for m in setup.model.modules())
