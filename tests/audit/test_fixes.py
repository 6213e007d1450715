"""Each fix does to a fork what it says."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from computes import Computes
from made_records import reading, record
from torch import Tensor, nn
from trial_setups import batches, cnn, images, loss, mlp, setup, sgd

from adiv_monitor.audit.training.setup import Fork
from adiv_monitor.audit.trials.fixes import FIXES, DoesNotApply
from adiv_monitor.report import StepReport


def first_inputs(fork, path: str = "") -> list[Tensor]:
    """Return the inputs of the layer at a path, or of the first, for each of the fork's batches."""
    seen: list[Tensor] = []
    layer = fork.model.get_submodule(path) if path else next(iter(fork.model.children()))
    handle = layer.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    for batch in fork.batches:
        fork.loss(fork.model, batch)
    handle.remove()
    return seen


@pytest.mark.parametrize("factor", [0.01, 0.3, 100])
def test_rates_multiply_every_groups_rate(factor: float) -> None:
    def two_groups(model: nn.Module) -> torch.optim.Optimizer:
        first, _, last = model
        groups = [{"params": first.parameters()}, {"params": last.parameters(), "lr": 0.5}]
        return torch.optim.SGD(groups, lr=0.2)

    fork = setup(optimizer=two_groups).fork()
    FIXES[f"rate*{factor:g}"].apply(fork)
    assert [g["lr"] for g in fork.optimizer.param_groups] == [0.2 * factor, 0.5 * factor]


def constant(x: Tensor) -> Tensor:
    """Return the inputs, or images, with a feature, or channel, that is 7 everywhere."""
    x = 160 * x
    x[:, -1] = 7.0
    return x


@pytest.mark.parametrize("of_images", [False, True])
def test_inputs_are_mapped_as_named_each_feature_or_channel_for_itself(of_images: bool) -> None:
    given = images() if of_images else batches()
    data = tuple((constant(x), y) for x, y in given)
    of = setup(model=cnn() if of_images else mlp(), batches=data, steps=len(data))
    axes = (0, 2, 3) if of_images else (0,)
    before = torch.cat([x for x, _ in data])
    std, mean = torch.std_mean(before, axes, correction=0, keepdim=True)
    fork = of.fork()
    FIXES["standardise-inputs"].apply(fork)
    found = torch.cat(first_inputs(fork))
    expected = (before - mean) / std.where(std > 0, 1.0)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 3)

    def forward(self, x: Tensor, mask: Tensor, *, labels: Tensor) -> Tensor:
        self.seen = x, mask, labels
        return (self.layer(x) * mask - labels).square().mean()


def test_masks_and_labels_are_no_inputs() -> None:
    data = [(100 * x, torch.ones(32, 1), torch.rand(32, 3)) for x, _ in batches(1)]
    fork = setup(
        model=Masked(),
        batches=tuple(data),
        steps=1,
        loss=lambda model, batch: model(batch[0], batch[1], labels=batch[2]),
    ).fork()
    FIXES["standardise-inputs"].apply(fork)
    fork.loss(fork.model, fork.batches[0])
    x, mask, labels = fork.model.seen
    assert x.abs().max() < 10
    assert torch.equal(mask, data[0][1]) and torch.equal(labels, data[0][2])


def test_converted_layers_keep_their_parameters_and_the_optimizer() -> None:
    fork = setup().fork()
    held = [id(p) for p in fork.model.parameters()]
    FIXES["affine-like"].apply(fork, ["2"])
    x = torch.randn(5, 12)
    hidden = fork.model[1](fork.model[0](x))
    layer, length = fork.model[2], hidden.norm(dim=1, keepdim=True)
    expected = (hidden @ layer.weight.t() + layer.bias) / (length**2 + 1).sqrt()
    torch.testing.assert_close(fork.model(x), expected)
    assert type(fork.model[0]) is nn.Linear
    groups = fork.optimizer.param_groups
    assert sorted(id(p) for g in groups for p in g["params"]) == sorted(held)


@pytest.mark.parametrize("path", ["0", "1", "2"])
@pytest.mark.parametrize("name", ["layer-norm", "batch-norm"])
def test_norms_stand_in_front_of_the_named_layer_or_activation(name: str, path: str) -> None:
    fork = setup(batches=batches(scale=5), steps=1).fork()
    (before,), (others,) = first_inputs(fork, path), first_inputs(fork, "0")
    FIXES[name].apply(fork, [path])
    dim = 0 if name == "batch-norm" else 1
    x = before - before.mean(dim, keepdim=True)
    expected = x / (x.square().mean(dim, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(first_inputs(fork, path)[0], expected, atol=1e-5, rtol=1e-4)
    assert torch.equal(first_inputs(fork, "0")[0], others) == (path != "0")


def test_rates_per_layer_bring_what_moves_too_far_back_to_its_limit() -> None:
    moves = {"0": 40.0, "2": 0.4, "elsewhere": 0.3}
    layers = {path: reading(update_ratio=move) for path, move in moves.items()}
    fork = setup(optimizer=sgd(lr=1e-3)).fork()
    seen = replace(record(), reports=(StepReport(0, layers, {}, 1.0),))
    FIXES["rate-per-layer"].apply(fork, (), seen)
    rates = [group["lr"] for group in fork.optimizer.param_groups]
    assert rates == pytest.approx(2 * [1e-3 * 0.7 / 40] + 2 * [1e-3])
    with pytest.raises(DoesNotApply, match="unlike the others"):
        FIXES["rate-per-layer"].apply(fork, (), record())


@pytest.mark.parametrize(
    ("name", "settings", "changed"),
    [
        ("no-decay", {"weight_decay": 0.5}, {"weight_decay": 0.0}),
        ("less-momentum", {"momentum": 0.8}, {"momentum": 0.4, "lr": 0.1}),
        ("less-momentum", {"momentum": 0.99}, {"momentum": 0.9, "lr": 0.1}),
        ("less-momentum", {"betas": (0.999, 0.99)}, {"betas": (0.9, 0.99)}),
    ],
)
def test_settings_are_changed(name: str, settings: dict[str, Any], changed: dict[str, Any]) -> None:
    kind = torch.optim.Adam if "betas" in settings else torch.optim.SGD
    fork = setup(optimizer=lambda m: kind(m.parameters(), **{"lr": 0.1, **settings})).fork()
    before = dict(fork.optimizer.param_groups[0])
    FIXES[name].apply(fork)
    assert fork.optimizer.param_groups[0] == {
        **before,
        **{key: pytest.approx(value) for key, value in changed.items()},
    }


def test_clipping_is_at_the_90th_percentile_of_what_was_seen_or_off() -> None:
    fork = setup().fork()
    FIXES["clip"].apply(fork, (), record(gradient_norms=tuple(map(float, range(1, 12)))))
    assert fork.clip_norm == 10
    FIXES["no-clip"].apply(fork)
    assert fork.clip_norm is None


@pytest.mark.parametrize(
    "name", ["no-decay", "less-momentum", "no-clip", "positions", "float32-weights", "relu-between"]
)
def test_what_is_not_there_is_not_taken_away(name: str) -> None:
    one_layer = setup(model=nn.Sequential(nn.Linear(12, 3)))
    with pytest.raises(DoesNotApply):
        FIXES[name].apply(one_layer.fork())


def outputs(fork: Fork, x: Tensor) -> Tensor:
    """What the model returns for inputs within the fork's loss, which a fix of calls changes."""
    seen: list[Tensor] = []
    with fork.model.register_forward_hook(lambda module, args, z: seen.append(z)):
        fork.loss(fork.model, (x, torch.zeros(len(x), dtype=torch.long)))
    return seen[0]


def test_weights_are_drawn_anew_by_their_fan_in() -> None:
    model = nn.Sequential(nn.Linear(12, 4000), nn.ReLU(), nn.Linear(4000, 3))
    nn.init.constant_(model[0].weight, 9.0)
    fork = setup(model=model).fork()
    FIXES["reinitialise"].apply(fork, ["1"])  # the weights before the activation
    assert fork.model[0].weight.std().item() == pytest.approx((2 / 12) ** 0.5, rel=0.05)
    assert fork.model[0].bias.abs().max() == 0
    assert torch.equal(fork.model[2].weight, model[2].weight)
    FIXES["reinitialise"].apply(fork)
    assert fork.model[2].weight.std().item() == pytest.approx((1 / 4000) ** 0.5, rel=0.05)


@pytest.mark.parametrize("name", FIXES)
def test_the_users_model_and_randomness_stay_as_they_are(name: str) -> None:
    faulty = setup(optimizer=sgd(momentum=0.9, weight_decay=0.1), clip_norm=1.0, steps=6)
    before = copy.deepcopy(faulty.model.state_dict())
    modules = [type(m) for m in faulty.model.modules()]
    state = torch.get_rng_state()
    fork = faulty.fork()
    try:
        FIXES[name].apply(fork, (), record())
    except DoesNotApply:
        return
    assert torch.equal(torch.get_rng_state(), state)
    loss(fork.model, fork.batches[0]).backward()
    fork.optimizer.step()
    assert all(torch.equal(p, before[n]) for n, p in faulty.model.state_dict().items())
    assert [type(m) for m in faulty.model.modules()] == modules
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in faulty.model.modules())


@pytest.mark.parametrize("within", [True, False])
def test_a_softmax_that_is_called_before_the_loss_is_left_out(within: bool) -> None:
    """In forward(), or in the loss."""

    def called(model: nn.Module, x: Tensor) -> Tensor:
        return model.layer(x).softmax(1) if within else model.layer(x)

    def taking(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        z = model(batch[0])
        return nn.functional.cross_entropy(z if within else z.softmax(1), batch[1])

    fork = setup(model=Computes(called, layer=nn.Linear(12, 3)), loss=taking).fork()
    x, y = fork.batches[0]
    plain = nn.functional.cross_entropy(fork.model.layer(x), y)
    assert fork.loss(fork.model, (x, y)) != plain
    FIXES["plain-outputs"].apply(fork)
    assert torch.equal(fork.loss(fork.model, (x, y)), plain)


def of_places(m: nn.Module, x: Tensor) -> Tensor:
    """Sum over places, whose order makes no difference, of embeddings or of patches."""
    made = m.first(x)
    rows = made if made.ndim == 3 else made.flatten(2).mT
    return m.last(rows.tanh().mean(1))


@pytest.mark.parametrize(
    ("first", "x"),
    [
        (nn.Embedding(5, 8), torch.arange(20).reshape(4, 5) % 5),
        (nn.Conv2d(1, 8, 2, stride=2), torch.randn(4, 1, 4, 6)),
    ],
)
def test_places_get_vectors_of_their_own(first: nn.Module, x: Tensor) -> None:
    model = Computes(of_places, first=first, last=nn.Linear(8, 3))
    fork = setup(model=model, batches=((x, torch.zeros(4).long()),)).fork()
    other = x.flip(1) if x.ndim == 2 else x.unflatten(3, (3, 2)).flip(3).flatten(3)
    torch.testing.assert_close(outputs(fork, x), outputs(fork, other))
    FIXES["positions"].apply(fork)
    assert (outputs(fork, x) - outputs(fork, other)).abs().max() > 1e-3


def test_weights_of_16_bits_become_float32() -> None:
    data = tuple((x.bfloat16(), y) for x, y in batches())
    fork = setup(model=mlp().bfloat16(), batches=data).fork()
    FIXES["float32-weights"].apply(fork)
    held = fork.optimizer.param_groups[0]["params"]
    assert {p.dtype for p in (*held, *(x for x, _ in fork.batches))} == {torch.float32}
    assert {id(p) for p in held} == {id(p) for p in fork.model.parameters()}
