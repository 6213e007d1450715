"""Each fix does to a fork what it says."""

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from trial_setups import batches, cnn, images, loss, mlp, record, setup, sgd

from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.audit.training.train import train
from adiv_monitor.audit.trials.fixes import FIXES, DoesNotApply
from adiv_monitor.audit.trials.fixes.inputs import feature_axis
from adiv_monitor.diagnosis.record import Record

NAMES = [
    "rate*0.1",
    "rate*0.3",
    "rate*3",
    "rate*10",
    "standardise-inputs",
    "centre-inputs",
    "scale-inputs",
    "affine-like",
    "norm-like",
    "layer-norm",
    "batch-norm",
    "rms-norm",
    "rate-per-layer",
    "group-rate",
    "hold-parameters",
    "unfreeze",
    "no-decay",
    "less-decay",
    "less-momentum",
    "usual-momentum",
    "relu-between",
    "no-clip",
    "clip",
    "leaky-relu",
    "reinitialise",
    "warm-up",
    "larger-batch",
    "plain-sgd",
    "adamw",
    "no-projection",
    "plain-outputs",
]


def test_every_fix_that_rules_may_name_is_there() -> None:
    assert set(NAMES) <= set(FIXES)
    assert all(name == fix.name and fix.text for name, fix in FIXES.items())


def first_inputs(fork, path: str = "") -> list[Tensor]:
    """Return the inputs of the layer at a path, or of the first, for each of the fork's batches."""
    seen: list[Tensor] = []
    layer = fork.model.get_submodule(path) if path else next(iter(fork.model.children()))
    handle = layer.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    for batch in fork.batches:
        fork.loss(fork.model, batch)
    handle.remove()
    return seen


@pytest.mark.parametrize("factor", [0.01, 0.1, 0.3, 3, 10, 100])
def test_rates_multiply_every_groups_rate(factor: float) -> None:
    def two_groups(model: nn.Module) -> torch.optim.Optimizer:
        first, _, last = model
        groups = [{"params": first.parameters()}, {"params": last.parameters(), "lr": 0.5}]
        return torch.optim.SGD(groups, lr=0.2)

    fork = setup(optimizer=two_groups).fork()
    FIXES[f"rate*{factor:g}"].apply(fork)
    assert [g["lr"] for g in fork.optimizer.param_groups] == [0.2 * factor, 0.5 * factor]


def test_standardised_inputs_have_mean_0_and_std_1() -> None:
    fork = setup(batches=batches(scale=160), steps=8).fork()
    FIXES["standardise-inputs"].apply(fork)
    x = torch.cat(first_inputs(fork))
    assert x.mean(0).abs().max() < 1e-5
    assert (x.std(0, correction=0) - 1).abs().max() < 1e-5


def test_channels_of_images_are_standardised() -> None:
    fork = setup(model=cnn(), batches=images(), steps=4).fork()
    FIXES["standardise-inputs"].apply(fork)
    x = torch.cat(first_inputs(fork))
    assert x.mean((0, 2, 3)).abs().max() < 1e-5
    assert (x.std((0, 2, 3), correction=0) - 1).abs().max() < 1e-5


def test_constant_features_stay_finite() -> None:
    data = [(torch.cat([x, torch.full((32, 1), 7.0)], 1), y) for x, y in batches()]
    model = nn.Sequential(nn.Linear(13, 3))
    fork = setup(model=model, batches=tuple(data), steps=8).fork()
    FIXES["standardise-inputs"].apply(fork)
    x = torch.cat(first_inputs(fork))
    assert x[:, -1].abs().max() == 0


def test_centred_inputs_keep_their_scale() -> None:
    fork = setup(batches=batches(scale=160), steps=8).fork()
    before = torch.cat(first_inputs(fork))
    FIXES["centre-inputs"].apply(fork)
    torch.testing.assert_close(
        torch.cat(first_inputs(fork)), before - before.mean(0), atol=1e-3, rtol=1e-5
    )


def test_scaled_inputs_are_divided_by_one_constant() -> None:
    fork = setup(batches=batches(scale=160), steps=8).fork()
    before = torch.cat(first_inputs(fork))
    FIXES["scale-inputs"].apply(fork)
    torch.testing.assert_close(
        torch.cat(first_inputs(fork)), before / before.square().mean().sqrt()
    )


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


def test_statistics_are_taken_without_running_the_model() -> None:
    model = nn.Sequential(nn.BatchNorm1d(12), nn.Linear(12, 3))
    fork = setup(model=model).fork()
    FIXES["standardise-inputs"].apply(fork)
    assert fork.model[0].num_batches_tracked == 0


@pytest.mark.parametrize(
    ("shape", "axis"), [((8,), None), ((8, 5), 1), ((8, 7, 5), 2), ((8, 3, 9, 9), 1)]
)
def test_features_are_where_they_belong(shape: tuple[int, ...], axis: int | None) -> None:
    assert feature_axis(torch.zeros(shape), mlp()) == axis


def test_channels_of_sequences_come_second_before_a_convolution() -> None:
    assert feature_axis(torch.zeros(8, 7, 5), nn.Sequential(nn.Conv1d(7, 2, 3))) == 1


def test_tokens_have_no_scale() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 3))
    data = tuple((torch.randint(10, (8,)), torch.randint(3, (8,))) for _ in range(3))
    with pytest.raises(DoesNotApply, match="no real numbers"):
        FIXES["standardise-inputs"].apply(setup(model=model, batches=data).fork())


def test_larger_batches_join_neighbours_for_as_many_steps() -> None:
    fork = setup(batches=batches(3), steps=7).fork()
    FIXES["larger-batch"].apply(fork)
    given = batches(3)
    assert len(fork.batches) == 7
    for step, pair in enumerate([(0, 1), (2, 0), (1, 2), (0, 1)]):
        x, y = fork.batches[step]
        assert torch.equal(x, torch.cat([given[i][0] for i in pair]))
        assert torch.equal(y, torch.cat([given[i][1] for i in pair]))


def test_batches_that_differ_in_shape_are_not_joined() -> None:
    data = tuple((torch.randn(4, n), torch.zeros(4)) for n in (3, 5))
    with pytest.raises(DoesNotApply, match="can't be joined"):
        FIXES["larger-batch"].apply(setup(batches=data).fork())
    with pytest.raises(DoesNotApply, match="one batch only"):
        FIXES["larger-batch"].apply(setup(batches=batches(1)).fork())


@pytest.mark.parametrize("name", ["affine-like", "norm-like"])
def test_converted_layers_keep_their_parameters_and_the_optimizer(name: str) -> None:
    fork = setup().fork()
    held = [id(p) for p in fork.model.parameters()]
    FIXES[name].apply(fork, ["2"])
    x = torch.randn(5, 12)
    hidden = fork.model[1](fork.model[0](x))
    layer, length = fork.model[2], hidden.norm(dim=1, keepdim=True)
    expected = {
        "affine-like": (hidden @ layer.weight.t() + layer.bias) / (length**2 + 1).sqrt(),
        "norm-like": hidden @ layer.weight.t() / length + layer.bias,
    }
    torch.testing.assert_close(fork.model(x), expected[name])
    assert type(fork.model[0]) is nn.Linear
    groups = fork.optimizer.param_groups
    assert sorted(id(p) for g in groups for p in g["params"]) == sorted(held)
    rates = {id(p): g["lr"] for g in groups for p in g["params"]}
    assert rates[id(layer.weight)] == 0.1 * (0.5 if name == "norm-like" else 1)
    assert rates[id(fork.model[0].weight)] == 0.1


@pytest.mark.parametrize("path", ["0", "2"])
@pytest.mark.parametrize("name", ["layer-norm", "rms-norm", "batch-norm"])
def test_norms_stand_in_front_of_the_named_layer(name: str, path: str) -> None:
    fork = setup(batches=batches(scale=5), steps=1).fork()
    before = {p: first_inputs(fork, p)[0] for p in ("0", "2")}
    FIXES[name].apply(fork, [path])
    dim, centred = (0 if name == "batch-norm" else 1), name != "rms-norm"
    x = before[path]
    x = x - x.mean(dim, keepdim=True) if centred else x
    expected = x / (x.square().mean(dim, keepdim=True) + 1e-5 * centred).sqrt()
    torch.testing.assert_close(first_inputs(fork, path)[0], expected, atol=1e-5, rtol=1e-4)
    if path == "2":
        assert torch.equal(first_inputs(fork, "0")[0], before["0"])


def test_norms_of_convolutions_are_over_samples_or_channels() -> None:
    x = 3 + 2 * images(1)[0][0]
    for name, dims in (("layer-norm", (1, 2, 3)), ("batch-norm", (0, 2, 3))):
        fork = setup(model=cnn(), batches=images(1), steps=1).fork()
        FIXES[name].apply(fork, ["0"])
        seen = first_inputs(fork, "0")[0]
        assert seen.shape == x.shape
        assert seen.mean(dims).abs().max() < 1e-5
        assert (seen.std(dims, correction=0) - 1).abs().max() < 1e-3


def test_in_front_of_an_activation_means_behind_the_layer_before_it() -> None:
    fork = setup(steps=1).fork()
    FIXES["batch-norm"].apply(fork, ["1"])
    assert first_inputs(fork, "1")[0].mean(0).abs().max() < 1e-5
    assert first_inputs(fork, "0")[0].mean(0).abs().max() > 0.1


@pytest.mark.parametrize("adam", [False, True])
def test_rates_per_layer_bring_what_moves_too_far_back_to_its_limit(adam: bool) -> None:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return (torch.optim.Adam if adam else torch.optim.SGD)(model.parameters(), lr=1e-3)

    of = setup(optimizer=optimizer, steps=6)
    seen = record(of)
    (report,) = seen.reports
    layers = {path: replace(report.layers["2"], update_ratio=move)
              for path, move in {"0": 40.0, "2": 0.4, "elsewhere": 0.3}.items()}  # fmt: skip
    fork = of.fork()
    FIXES["rate-per-layer"].apply(
        fork, (), replace(seen, reports=(replace(report, layers=layers),))
    )
    rates = [group["lr"] for group in fork.optimizer.param_groups]
    assert rates == pytest.approx([1e-3 * 0.7 / 40, 1e-3])


def test_rates_per_layer_need_a_record() -> None:
    with pytest.raises(DoesNotApply, match="unlike the others"):
        FIXES["rate-per-layer"].apply(setup().fork())


def test_a_group_gets_the_learning_rate_of_the_other_layers() -> None:
    def groups(own: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
        return lambda m: torch.optim.SGD(
            [{"params": m[0].parameters()}, {"params": m[2].parameters(), "lr": own}], lr=0.1
        )

    faulty = setup(optimizer=groups(1e-4), steps=6)
    seen = record(faulty)
    assert seen.reports[0].groups == {"0": 0, "2": 1}
    fork = faulty.fork()
    FIXES["group-rate"].apply(fork, ["2"], seen)
    assert [g["lr"] for g in fork.optimizer.param_groups] == [0.1, 0.1]
    alike = setup(optimizer=groups(0.1), steps=6)
    assert record(alike).reports[0].groups == {}
    with pytest.raises(DoesNotApply, match="no learning rate of their own"):
        FIXES["group-rate"].apply(alike.fork(), ["2"], record(alike))


def test_held_parameters() -> None:
    fork = setup(optimizer=lambda m: torch.optim.SGD(m[2].parameters(), lr=0.1)).fork()
    fork.optimizer.param_groups[0]["lr"] = 0.3
    FIXES["hold-parameters"].apply(fork)
    held = {id(p) for g in fork.optimizer.param_groups for p in g["params"]}
    assert held == {id(p) for p in fork.model.parameters()}
    assert {g["lr"] for g in fork.optimizer.param_groups} == {0.3}
    with pytest.raises(DoesNotApply, match="holds all"):
        FIXES["hold-parameters"].apply(fork)


@pytest.mark.parametrize("layers", [["0"], ["0.weight", "0.bias"], []])
def test_unfrozen_layers_are_trained(layers: list[str]) -> None:
    model = mlp()
    model[0].requires_grad_(False)
    faulty = setup(
        model=model,
        optimizer=lambda m: torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1),
    )
    fork = faulty.fork()
    FIXES["unfreeze"].apply(fork, layers)
    assert all(p.requires_grad for p in fork.model.parameters())
    assert sum(len(g["params"]) for g in fork.optimizer.param_groups) == 4
    assert not model[0].weight.requires_grad
    with pytest.raises(DoesNotApply, match="nothing is frozen"):
        FIXES["unfreeze"].apply(setup().fork(), layers)


def test_decay_and_momentum_and_clipping() -> None:
    faulty = setup(optimizer=sgd(momentum=0.8, weight_decay=0.5), clip_norm=2.0)
    settings = {}
    for name in ("no-decay", "less-decay", "less-momentum", "no-clip"):
        fork = faulty.fork()
        FIXES[name].apply(fork)
        group = fork.optimizer.param_groups[0]
        settings[name] = group["weight_decay"], group["momentum"], group["lr"], fork.clip_norm
    assert settings["no-decay"] == (0, 0.8, 0.1, 2)
    assert settings["less-decay"] == (0.05, 0.8, 0.1, 2)
    assert settings["less-momentum"] == (0.5, 0.4, pytest.approx(0.1 * 0.6 / 0.2), 2)
    assert settings["no-clip"] == (0.5, 0.8, 0.1, None)


def test_betas_are_momentum() -> None:
    fork = setup(optimizer=lambda m: torch.optim.Adam(m.parameters(), betas=(0.9, 0.99))).fork()
    FIXES["less-momentum"].apply(fork)
    assert fork.optimizer.param_groups[0]["betas"] == (0.45, 0.99)


def test_clipping_at_the_90th_percentile_of_what_was_seen() -> None:
    healthy = setup()
    seen = record(healthy)
    fork = healthy.fork()
    FIXES["clip"].apply(fork, (), seen)
    assert fork.clip_norm == pytest.approx(
        torch.tensor(seen.gradient_norms, dtype=torch.float64).quantile(0.9).item()
    )


@pytest.mark.parametrize(
    "name", ["no-decay", "less-decay", "less-momentum", "no-clip", "plain-sgd", "no-projection"]
)
def test_what_is_not_there_is_not_taken_away(name: str) -> None:
    with pytest.raises(DoesNotApply):
        FIXES[name].apply(setup().fork())


def test_other_optimizers() -> None:
    fork = setup(optimizer=sgd(momentum=0.9, weight_decay=0.1)).fork()
    FIXES["plain-sgd"].apply(fork)
    group = fork.optimizer.param_groups[0]
    assert (group["momentum"], group["weight_decay"]) == (0, 0)
    assert group["lr"] == pytest.approx(1.0)
    FIXES["adamw"].apply(fork)
    assert type(fork.optimizer) is torch.optim.AdamW
    assert {id(p) for p in fork.optimizer.param_groups[0]["params"]} == {
        id(p) for p in fork.model.parameters()
    }


def test_a_projection_is_taken_off() -> None:
    def projected(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        @torch.no_grad()
        def project(*_: object) -> None:
            model[0].weight.fill_(1.0)

        optimizer.register_step_post_hook(project)
        return optimizer

    fork = setup(optimizer=projected).fork()
    FIXES["no-projection"].apply(fork)
    fork.loss(fork.model, fork.batches[0]).backward()
    fork.optimizer.step()
    assert not torch.equal(fork.model[0].weight, torch.ones(16, 12))


def test_the_rate_rises_in_the_first_third_of_the_steps() -> None:
    fork = setup(steps=12).fork()
    FIXES["warm-up"].apply(fork)
    rates = []
    for batch in fork.batches:
        rates.append(fork.optimizer.param_groups[0]["lr"])
        fork.optimizer.zero_grad()
        fork.loss(fork.model, batch).backward()
        fork.optimizer.step()
    expected = [0.1 * (0.01 + 0.99 * min(step / 4, 1)) for step in range(12)]
    assert rates == pytest.approx(expected)


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = self.layer(x)
        return torch.relu(z).relu_() + nn.functional.relu(z, inplace=False)


@pytest.mark.parametrize("layers", [[], [""], ["", "#2"]])
def test_relus_that_are_functions_leak(layers: list[str]) -> None:
    fork = setup(model=Functional()).fork()
    x = torch.randn(5, 12)
    z = fork.model.layer(x)
    FIXES["leaky-relu"].apply(fork, layers)
    leaky = nn.functional.leaky_relu(z, 0.1)
    torch.testing.assert_close(outputs(fork, x), nn.functional.leaky_relu(leaky, 0.1) + leaky)


def outputs(fork: Fork, x: Tensor) -> Tensor:
    """What the model returns for inputs within the fork's loss, which a fix of calls changes."""
    seen: list[Tensor] = []
    with fork.model.register_forward_hook(lambda module, args, z: seen.append(z)):
        fork.loss(fork.model, (x, torch.zeros(len(x), dtype=torch.long)))
    return seen[0]


def test_only_the_named_relus_leak() -> None:
    model = nn.Sequential(nn.ReLU(), nn.Linear(12, 12), nn.ReLU(inplace=True), nn.Linear(12, 3))
    fork = setup(model=model).fork()
    FIXES["leaky-relu"].apply(fork, ["2"])
    x = torch.randn(5, 12)
    hidden = nn.functional.leaky_relu(fork.model[1](x.relu()), 0.1)
    torch.testing.assert_close(outputs(fork, x), fork.model[3](hidden))
    with pytest.raises(DoesNotApply, match="no such activation"):
        FIXES["leaky-relu"].apply(setup(model=nn.Sequential(nn.Linear(12, 3))).fork())


class Saturating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.squash = nn.Linear(12, 3), nn.Hardtanh(-2, 2)

    def forward(self, x: Tensor) -> Tensor:
        z = self.layer(x)
        return self.squash(z) + z.sigmoid() + nn.functional.softsign(z) + z.clone().tanh_()


def test_saturating_functions_become_relus() -> None:
    fork = setup(model=Saturating()).fork()
    FIXES["relu"].apply(fork)
    x = torch.randn(5, 12)
    torch.testing.assert_close(outputs(fork, x), 4 * fork.model.layer(x).relu())


def test_where_the_named_layers_run_no_activation_all_are_replaced() -> None:
    model = nn.Sequential(nn.Linear(12, 12), nn.Sigmoid(), nn.Linear(12, 3))
    fork = setup(model=model).fork()
    FIXES["relu"].apply(fork, ["0"])
    x = torch.randn(5, 12)
    torch.testing.assert_close(outputs(fork, x), fork.model[2](fork.model[0](x).relu()))


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


def test_the_last_layer_is_the_one_that_runs_last() -> None:
    class HeadFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.body = nn.Linear(4000, 3), nn.Linear(12, 4000)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x).relu())

    of = setup(model=HeadFirst(), steps=2)
    fork = of.fork()
    FIXES["reinitialise"].apply(fork, (), record(of))
    assert fork.model.head.weight.std().item() == pytest.approx((1 / 4000) ** 0.5, rel=0.05)
    assert fork.model.body.weight.std().item() == pytest.approx((2 / 12) ** 0.5, rel=0.05)


def decayed() -> Setup:
    """Return a setup that every fix can change something of, the same at every call."""
    torch.manual_seed(0)
    return setup(optimizer=sgd(momentum=0.9, weight_decay=0.1), clip_norm=1.0, steps=6)


@pytest.fixture(scope="module")
def seen() -> Record:
    return record(decayed())


@pytest.mark.parametrize("name", FIXES)
def test_the_users_model_and_randomness_stay_as_they_are(name: str, seen: Record) -> None:
    faulty = decayed()
    before = copy.deepcopy(faulty.model.state_dict())
    modules = [type(m) for m in faulty.model.modules()]
    state = torch.get_rng_state()
    fork = faulty.fork()
    try:
        FIXES[name].apply(fork, (), seen)
    except DoesNotApply:
        return
    assert torch.equal(torch.get_rng_state(), state)
    loss(fork.model, fork.batches[0]).backward()
    fork.optimizer.step()
    assert all(torch.equal(p, before[n]) for n, p in faulty.model.state_dict().items())
    assert [type(m) for m in faulty.model.modules()] == modules
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in faulty.model.modules())


def test_outputs_are_given_as_the_last_layer_has_them() -> None:
    fork = setup(model=nn.Sequential(*mlp(), nn.ReLU())).fork()
    x, _ = fork.batches[0]
    before = fork.model[:-1](x)
    assert before.min() < 0
    FIXES["plain-outputs"].apply(fork)
    assert torch.equal(fork.model(x), before)
    with pytest.raises(DoesNotApply, match="no activation function"):
        FIXES["plain-outputs"].apply(setup().fork())


def test_momentum_that_is_far_too_long_becomes_the_usual_one() -> None:
    fork = setup(optimizer=lambda m: torch.optim.Adam(m.parameters(), betas=(0.999, 0.99))).fork()
    FIXES["less-momentum"].apply(fork)
    assert fork.optimizer.param_groups[0]["betas"] == (0.9, 0.99)
    fork = setup(optimizer=sgd(momentum=0.99)).fork()
    rate = fork.optimizer.param_groups[0]["lr"]
    FIXES["less-momentum"].apply(fork)
    group = fork.optimizer.param_groups[0]
    assert group["momentum"] == 0.9 and group["lr"] == pytest.approx(10 * rate)


def test_a_momentum_typed_wrongly_becomes_the_usual_one_at_the_same_rate() -> None:
    fork = setup(optimizer=sgd(momentum=0.999)).fork()
    rate = fork.optimizer.param_groups[0]["lr"]
    FIXES["usual-momentum"].apply(fork)
    group = fork.optimizer.param_groups[0]
    assert (group["momentum"], group["lr"]) == (0.9, rate)
    with pytest.raises(DoesNotApply, match="no momentum is above"):
        FIXES["usual-momentum"].apply(setup(optimizer=sgd(momentum=0.9)).fork())


@pytest.mark.parametrize("within", [True, False])
def test_a_softmax_that_is_called_before_the_loss_is_left_out(within: bool) -> None:
    """In forward(), or in the loss."""

    class Called(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(12, 3)

        def forward(self, x: Tensor) -> Tensor:
            z: Tensor = self.layer(x)
            return z.softmax(1) if within else z

    def taking(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        z = model(batch[0])
        return nn.functional.cross_entropy(z if within else z.softmax(1), batch[1])

    fork = setup(model=Called(), loss=taking).fork()
    x, y = fork.batches[0]
    plain = nn.functional.cross_entropy(fork.model.layer(x), y)
    assert fork.loss(fork.model, (x, y)) != plain
    FIXES["plain-outputs"].apply(fork)
    assert torch.equal(fork.loss(fork.model, (x, y)), plain)


def test_a_relu_comes_behind_each_layer_but_the_last() -> None:
    fork = setup(model=nn.Sequential(nn.Linear(12, 8), nn.Linear(8, 3))).fork()
    x = fork.batches[0][0]
    expected = fork.model[1](fork.model[0](x).relu())
    FIXES["relu-between"].apply(fork)
    assert torch.equal(fork.model(x), expected)
    with pytest.raises(DoesNotApply, match="fewer than two"):
        FIXES["relu-between"].apply(setup(model=nn.Linear(12, 3)).fork())


class StaysStill(nn.Module):
    """Keeps its normalisation in evaluation mode, whatever mode it is put in."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        self.layers.eval()

    def train(self, mode: bool = True) -> "StaysStill":
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class StillsItself(StaysStill):
    """Puts its normalisation into evaluation mode in each forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        self.layers[1].eval()
        return self.layers(x)


@pytest.mark.parametrize("model", [StaysStill, StillsItself])
def test_training_mode_reaches_modules_that_the_model_keeps_in_evaluation_mode(
    model: Callable[[], nn.Module],
) -> None:
    fork = setup(model=model()).fork()
    norm = fork.model.get_submodule("layers.1")
    assert not norm.training
    FIXES["train-mode"].apply(fork)
    train(fork)
    assert norm.training and norm.num_batches_tracked == len(fork.batches)
