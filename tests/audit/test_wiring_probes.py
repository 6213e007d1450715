"""Bugs of wiring, outputs and epsilon: each is seen, and its healthy relatives are not."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Adam, AdamW, Optimizer, RMSprop
from trial_setups import answer, batches, loss, mlp, setup

from adiv_monitor.audit.experiments.attention import spread, sums_to_1, uses
from adiv_monitor.audit.experiments.calls import Call
from adiv_monitor.audit.experiments.derived import Derived
from adiv_monitor.audit.experiments.observe import observe
from adiv_monitor.audit.training.setup import Setup
from adiv_monitor.audit.training.train import train
from adiv_monitor.audit.trials.fixes import FIXES, DoesNotApply
from adiv_monitor.diagnosis import diagnose
from adiv_monitor.diagnosis.faults.loss import STUCK
from adiv_monitor.diagnosis.record import Probed


def asked(name: str, of: Setup) -> Probed:
    return answer(name, of, of.fork())


def named(of: Setup) -> dict[str, str]:
    """Return the findings of a short run, of which nothing is tried, with their strengths."""
    return {
        finding.name: finding.strength
        for finding in diagnose(observe(replace(of, steps=12), every_n_steps=6))
    }


def with_model(model: nn.Module) -> Setup:
    return setup(model=model)


# Attention

Weighing = Callable[["Attending", Tensor, Tensor, Tensor], Tensor]


class Attending(nn.Module):
    """Four places of three features each, with two heads of four features, and a way to attend."""

    def __init__(self, attend: Weighing, gain: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attend, self.drop = attend, nn.Dropout(0.2)
        self.take, self.qkv, self.head = nn.Linear(3, 8), nn.Linear(8, 24), nn.Linear(8, 3)
        self.logits, self.gain = nn.Linear(4, 5), gain

    def forward(self, x: Tensor) -> Tensor:
        z = self.take(x.reshape(-1, 4, 3))
        parts = self.qkv(z).reshape(len(z), 4, 3, 2, 4).permute(2, 0, 3, 1, 4)
        q, k, v = (self.gain * parts[0], *parts[1:])
        return self.head(self.attend(self, q, k, v).mean(2).flatten(1))


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5


def along(axis: int) -> Weighing:
    return lambda net, q, k, v: net.drop(scores(q, k).softmax(axis)) @ v


def masked(axis: int) -> Weighing:
    def attend(net: Attending, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = scores(q, k).masked_fill(~torch.ones(4, 4, dtype=torch.bool).tril(), -torch.inf)
        return torch.bmm(functional.softmax(s, dim=axis).flatten(0, 1), v.flatten(0, 1)).view_as(v)

    return attend


def einsum(axis: int) -> Weighing:
    def attend(net: Attending, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = torch.einsum("...qd,...kd->...qk", q, k).softmax(axis)
        return torch.einsum("bhqk,bhkd->bhqd", weights, v)

    return attend


def on_the_right(axis: int) -> Weighing:
    """The values on the left: Vᵀ Aᵀ."""

    def attend(net: Attending, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (v.transpose(-1, -2) @ scores(k, q).softmax(axis)).transpose(-1, -2)

    return attend


def pooled(axis: int) -> Weighing:
    """One score for each place, (…, 4, 1), from a layer."""

    def attend(net: Attending, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits = net.logits(q.tanh())[..., :1]
        return logits.softmax(axis).transpose(-1, -2) @ v

    return attend


def by_hand_pooled(axis: int) -> Weighing:
    """One score for each place, whose products are summed."""

    def attend(net: Attending, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = functional.softmax(net.logits(q.tanh())[..., :1], dim=axis)
        return (weights * v).sum(-2, keepdim=True)

    return attend


WRONG = [along(-2), along(1), masked(-2), einsum(2), on_the_right(-1), pooled(-1),
         by_hand_pooled(-1)]  # fmt: skip
RIGHT = [along(-1), masked(-1), einsum(3), on_the_right(-2), pooled(-2), by_hand_pooled(-2)]


@pytest.mark.parametrize("attend", WRONG)
def test_weights_that_sum_to_1_along_another_axis_are_seen(attend: Weighing) -> None:
    (fact,) = asked("attention-axis", with_model(Attending(attend))).facts
    assert fact.place.startswith("softmax (test_wiring_probes.py:")
    assert fact.words["axis"] != fact.words["over"]


@pytest.mark.parametrize("attend", RIGHT)
def test_weights_that_sum_to_1_along_the_summed_axis_are_no_fault(attend: Weighing) -> None:
    of = with_model(Attending(attend))
    assert asked("attention-axis", of) == Probed()
    if attend not in RIGHT[-2:]:  # whose scores a layer computes
        assert len(uses(of.fork())) == 1, "it is looked at"


def slots(net: Attending, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Slots compete for places, and take means of what they got (Locatello et al. 2020)."""
    weights = scores(q, k).softmax(-2) + 1e-6
    return weights / weights.sum(-1, keepdim=True) @ v


def clusters(net: Attending, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each place is assigned to clusters, whose members are summed (Ying et al. 2018)."""
    assigned = net.logits(q).softmax(-1)
    return (assigned.transpose(-1, -2) @ v)[..., :4, :]


def linear_attention(net: Attending, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmaxes over features of queries and over places of keys (Shen et al. 2018)."""
    return q.softmax(-1) @ (k.softmax(-2).transpose(-1, -2) @ v)


def both_ways(net: Attending, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Weights of queries times weights of keys are weights again (Xiong et al. 2017)."""
    s = scores(q, k)
    return s.softmax(-1) @ s.softmax(-2).transpose(-1, -2) @ v


def experts(net: Attending, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    gate = net.logits(q)[..., :2].softmax(-1)
    return torch.einsum("bhqe,bhqed->bhqd", gate, torch.stack([k, v], 3))


def gated(net: Attending, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A softmax over features as a gate, whose results are summed over places."""
    return (net.logits(q).softmax(-1)[..., :4] * v).sum(-2, keepdim=True)


def fused(net: Attending, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize(
    "attend", [slots, clusters, linear_attention, both_ways, experts, gated, fused],
    ids=lambda attend: attend.__name__,
)  # fmt: skip
def test_other_ways_to_weigh_are_no_fault(attend: Weighing) -> None:
    assert asked("attention-axis", with_model(Attending(attend))) == Probed()


@pytest.mark.parametrize("attend", WRONG)
def test_the_softmax_is_moved_to_the_summed_axis(attend: Weighing) -> None:
    of = with_model(Attending(attend))
    fork = of.fork()
    FIXES["summed-axis"].apply(fork)
    moved = train(fork).losses
    right = {**dict(zip(WRONG, RIGHT[:1] * 2 + RIGHT[1:], strict=True))}[attend]
    assert moved == pytest.approx(train(with_model(Attending(right)).fork()).losses, rel=1e-5)
    with pytest.raises(DoesNotApply, match="all weights sum to 1"):
        FIXES["summed-axis"].apply(with_model(Attending(right)).fork())


def test_a_wrong_axis_is_watched_and_the_right_one_is_not_named() -> None:
    assert named(with_model(Attending(along(-2))))["attention-axis"] == "watch"
    assert "attention-axis" not in named(with_model(Attending(along(-1))))


def test_a_tensor_with_negative_entries_holds_no_weights() -> None:
    assert sums_to_1(torch.tensor([[2.0, -1.0], [0.5, 0.5]])) == ()
    assert sums_to_1(torch.tensor([[1.0, 0.0], [0.5, 0.5]])) == (1,)
    assert sums_to_1(torch.eye(2)) == (0, 1)


def test_masked_scores_do_not_count_in_the_spread() -> None:
    x = torch.tensor([[1.0, 3.0, -torch.inf, -1e4], [2.0, 0.0, -98.0, -3e38]]).double()
    assert spread(x, -1) == pytest.approx(1.0)
    assert spread(torch.full((1, 4), -torch.inf).double(), -1) != 0, "not known"


def test_saturated_attention_is_seen_and_its_scores_are_divided() -> None:
    sharp, well = (with_model(Attending(along(-1), gain)) for gain in (40.0, 1.0))
    (fact,) = asked("attention-saturated", sharp).facts
    assert fact.numbers["spread"] > 3 and fact.numbers["largest"] > 0.6
    (fact,) = asked("attention-saturated", well).facts
    assert fact.numbers["spread"] < 1
    assert named(sharp)["attention-saturated"] == "watch"
    assert "attention-saturated" not in named(well)
    fork = sharp.fork()
    FIXES["unit-scores"].apply(fork)
    assert spread_of(fork) == pytest.approx(1.0, rel=1e-4)
    with pytest.raises(DoesNotApply):
        FIXES["unit-scores"].apply(well.fork())


def spread_of(fork: Any) -> float:
    (use,) = uses(fork)
    return spread(use.softmax.argument(0, "input").detach().double(), -1)


def test_products_end_what_derives_entry_by_entry() -> None:
    made, x = Derived(), torch.ones(2, 2)

    def call(name: str, *args: Tensor, result: Tensor) -> Call:
        return Call(0, name, None, args, {}, result, torch.add)

    begin = call("softmax", result=x)
    made.begin(begin)
    y, z, w = x.T, x @ x, x[:1]
    made.follow(call("transpose", x, result=y))
    made.follow(call("matmul", y, result=z))
    made.follow(call("__getitem__", y, result=w))
    assert [made.source(each) for each in (x, y, z, w)] == [begin, begin, None, begin]


# Constant outputs


def hidden(*layers: nn.Module, last: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), *layers, last or nn.Linear(16, 3))


def of_scale(layer: nn.Module, scale: float) -> nn.Module:
    nn.init.constant_(layer.weight, scale)  # type: ignore[arg-type]
    return layer


class Branched(nn.Module):
    """A sum of features and a branch of them, in front of a last layer."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.branch, self.last = nn.Linear(12, 16), branch, nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(x)
        return self.last(z + self.branch(z))


class Averaging(nn.Module):
    """A mean of normalised features, which is 0, or of what a ReLU leaves of them."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.act, self.last = nn.LayerNorm(12), act, nn.Linear(1, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.act(self.norm(x)).mean(1, keepdim=True))


@pytest.mark.parametrize(
    ("faulty", "healthy", "place", "by"),
    [
        (hidden(nn.GroupNorm(16, 16), nn.Dropout(), nn.Sigmoid(), nn.Dropout()),
         hidden(nn.GroupNorm(4, 16), nn.Sigmoid()), "1", "norm"),
        (hidden(of_scale(nn.BatchNorm1d(16), 0.0), nn.ReLU()),
         hidden(of_scale(nn.BatchNorm1d(16), 0.1), nn.ReLU()), "1", "weight"),
        (hidden(of_scale(nn.Linear(16, 1), 0.1), nn.Sigmoid(), of_scale(nn.Linear(1, 16), -9.0),
                nn.ReLU()),
         hidden(of_scale(nn.Linear(16, 1), 0.1), nn.Sigmoid(), of_scale(nn.Linear(1, 16), 9.0),
                nn.ReLU()), "4", "zeros"),
        (Averaging(nn.Identity()), Averaging(nn.ReLU()), "last", ""),
    ],
    ids=["norm", "weight", "zeros", "mean"],
)  # fmt: skip
def test_outputs_that_are_the_same_for_all_samples_are_named(
    faulty: nn.Module, healthy: nn.Module, place: str, by: str
) -> None:
    (fact,) = asked("outputs-constant", with_model(faulty)).facts
    assert (fact.place, fact.words["by"]) == (place, by) and fact.numbers["share"] < 1e-6
    assert asked("outputs-constant", with_model(healthy)) == Probed()


@pytest.mark.parametrize(
    "model",
    [Branched(of_scale(nn.LayerNorm(16), 0.0)), hidden(last=of_scale(nn.Linear(16, 3), 0.0)),
     hidden(nn.Threshold(1e3, 0.0))],
    ids=["branch", "last layer", "all ignored"],
)  # fmt: skip
def test_branches_and_last_layers_may_begin_at_zero_and_ignored_inputs_have_their_own_finding(
    model: nn.Module,
) -> None:
    assert asked("outputs-constant", with_model(model)) == Probed()


def test_a_constant_branch_of_outputs_that_differ_is_no_fault() -> None:
    torch.manual_seed(0)

    class Ending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.branch = nn.Linear(12, 3), nn.GroupNorm(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            z = self.first(x)
            return z + self.branch(z)

    assert asked("outputs-constant", with_model(Ending())) == Probed()


def test_constant_outputs_are_a_finding() -> None:
    assert "outputs-constant" in named(with_model(hidden(nn.GroupNorm(16, 16), nn.ReLU())))
    assert "outputs-constant" not in named(with_model(hidden(nn.GroupNorm(4, 16), nn.ReLU())))


class Pair(nn.Module):
    """Two parts that a loss of two views calls by itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 8))
        self.predictor = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.teacher = nn.Linear(12, 8).requires_grad_(False)
        nn.init.constant_(self.teacher.bias, 3.0)


def views(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    x, net = batch[0], model.net
    return net(x + 0.3 * torch.randn_like(x)), net(x + 0.3 * torch.randn_like(x))


def towards(a: Tensor, b: Tensor) -> Tensor:
    return -functional.cosine_similarity(a, b).mean()


def alike(model: nn.Module, batch: Any) -> Tensor:
    return towards(*views(model, batch))


def without_stop(model: nn.Module, batch: Any) -> Tensor:
    a, b = views(model, batch)
    return towards(model.predictor(a), b) + towards(model.predictor(b), a)


def with_stop(model: nn.Module, batch: Any) -> Tensor:
    a, b = views(model, batch)
    return towards(model.predictor(a), b.detach()) + towards(model.predictor(b), a.detach())


def with_negatives(model: nn.Module, batch: Any) -> Tensor:
    a, b = (functional.normalize(z) for z in views(model, batch))
    return functional.cross_entropy(a @ b.T / 0.1, torch.arange(len(a)))


def taught(model: nn.Module, batch: Any) -> Tensor:
    """The features of a frozen teacher, of which a part is the same for all samples."""
    features = model.teacher(batch[0])
    return functional.mse_loss(model.net(batch[0]), features)


def of_one_value(model: nn.Module, batch: Any) -> Tensor:
    return functional.mse_loss(views(model, batch)[0], torch.ones(len(batch[0]), 8))


def classified(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(views(model, batch)[0], batch[1])


@pytest.mark.parametrize(
    ("of_views", "is_named"),
    [(alike, True), (without_stop, True), (with_stop, False), (with_negatives, False),
     (taught, False), (of_one_value, False), (classified, False)],
)  # fmt: skip
def test_outputs_that_collapse_are_told_from_those_that_may_be_alike(
    of_views: Any, is_named: bool
) -> None:
    adam = partial(Adam, lr=3e-3)
    of = setup(model=Pair(), loss=of_views, optimizer=lambda m: adam(m.parameters()), steps=60)
    trained = of.fork()
    train(trained)
    found = answer("collapsed", of, trained)
    assert bool(found.facts) is is_named and not found.untold
    for fact in found.facts:
        assert fact.numbers["after"] < 0.5 * fact.numbers["before"]
    assert answer("collapsed", of, of.fork()) == Probed()


def test_outputs_that_decay_to_a_constant_are_no_collapse() -> None:
    """The outputs of a sample, for all, may be better than the constant by chance."""

    class Classified(nn.Module):
        def __init__(self, scale: float, shift: float) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(scale))
            self.shift = nn.Parameter(torch.tensor(shift))

        def forward(self, x: Tensor) -> Tensor:
            return functional.pad(self.scale * x + self.shift, (0, 2))

    x = torch.full((8, 1), -2.0)
    x[0] = x[4] = 0.2
    batch = (x, torch.tensor([0, 1, 2, 0, 1, 2, 0, 0]))
    of = setup(
        model=Classified(1.0, 0.0),
        loss=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        batches=(batch,),
    )
    trained = replace(of, model=Classified(1e-6, -1e-3)).fork()
    before, after, alike = (
        functional.cross_entropy(model(inputs), batch[1])
        for model, inputs in ((of.model, x), (trained.model, x), (of.model, x[:1].expand_as(x)))
    )
    assert alike < after < before
    assert answer("collapsed", of, trained) == Probed()


def test_a_model_that_returns_its_loss_only_can_not_be_told_to_collapse() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair = Pair()

        def forward(self, x: Tensor) -> Tensor:
            return alike(self.pair, (x,))

    found = asked("collapsed", setup(model=Own(), loss=lambda model, batch: model(batch[0])))
    assert not found.facts and "no trained module" in found.untold


# Evaluation mode


class Calls(nn.Module):
    """Calls a function of hidden features and of itself."""

    def __init__(self, function: Callable[[Tensor, nn.Module], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function, self.drop = function, nn.Dropout(0.5)
        self.inner, self.head = nn.Linear(12, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.function(self.inner(x).relu(), self))


def attended(x: Tensor, rate: float) -> Tensor:
    x = x.unflatten(1, (4, 4))
    return functional.scaled_dot_product_attention(x, x, x, dropout_p=rate).flatten(1)


def sampled(x: Tensor, model: Any) -> Tensor:
    """Monte-Carlo dropout: the module that drops stays in training mode."""
    dropped: Tensor = model.drop.train()(x)
    return dropped


@pytest.mark.parametrize(
    "drops",
    [
        lambda x, model: functional.dropout(x, 0.5),
        lambda x, model: functional.dropout(x, p=0.5, training=True),
        lambda x, model: torch.dropout(x, 0.5, True),
        lambda x, model: attended(x, 0.5),
    ],
)
def test_dropout_in_evaluation_mode_is_watched(drops: Any) -> None:
    model = Calls(drops)
    (fact,) = asked("dropout-in-eval", with_model(model)).facts
    assert (fact.numbers == {"rate": 0.5} and "dropout" in fact.place) or "attention" in fact.place
    x = torch.ones(8, 12)
    assert not model.eval()(x).equal(model(x))
    assert named(with_model(model))["dropout-in-eval"] == "watch"


@pytest.mark.parametrize(
    "drops",
    [
        lambda x, model: functional.dropout(x, 0.5, model.training),
        lambda x, model: model.drop(x),
        lambda x, model: functional.dropout(x, 0.0),
        lambda x, model: x + torch.randn_like(x),  # samples, as a VAE does
        lambda x, model: attended(x, 0.5 * model.training),
        sampled,
    ],
)
def test_noise_in_training_or_on_purpose_is_no_dropout_in_evaluation_mode(drops: Any) -> None:
    assert asked("dropout-in-eval", with_model(Calls(drops))) == Probed()


def normalised_by(**options: Any) -> Any:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(16, **options)
    return nn.Sequential(nn.Linear(12, 16), norm, nn.ReLU(), nn.Linear(16, 3))


@pytest.mark.parametrize("momentum", [0.0, 0.9, 0.99, 1.0])
def test_running_statistics_that_are_no_average_are_watched(momentum: float) -> None:
    of = with_model(normalised_by(momentum=momentum))
    (fact,) = asked("running-statistics", of).facts
    assert fact.place == "1" and fact.numbers == {"momentum": momentum}
    fork = of.fork()
    train(fork)
    model: Any = fork.model
    norm, x = model[1], model[0](fork.batches[-1][0])
    mean = x.mean(0) if momentum else torch.zeros(16)
    assert (norm.running_mean - mean).norm() < 0.2 * x.mean(0).norm(), "no average of batches"
    assert named(of)["running-statistics"] == "watch"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.01},  # as EfficientNet's
        {"momentum": None},  # the mean of all batches
        {"momentum": 0.99, "track_running_stats": False},
    ],
)
def test_running_statistics_of_many_batches_are_no_fault(options: Any) -> None:
    assert asked("running-statistics", with_model(normalised_by(**options))) == Probed()


def test_statistics_that_are_given_may_be_kept() -> None:
    model = normalised_by(momentum=0.0)
    model[1].running_mean += 1.0
    assert asked("running-statistics", with_model(model)) == Probed()


# Outputs


def ends_in(last: nn.Module, outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, outputs), last)


def squared(model: nn.Module, batch: Any, scale: float = 1.0, shift: float = 0.0) -> Tensor:
    x, _ = batch
    target = scale * (x[:, 0] - x[:, 1]) / 2 + shift
    return functional.mse_loss(model(x).squeeze(-1), target)


def by_hand(model: nn.Module, batch: Any) -> Tensor:
    x, _ = batch
    return (model(x)[:, 0] - x[:, 0]).square().mean()


def negative_log(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return functional.nll_loss(model(x).log_softmax(1), y)


@pytest.mark.parametrize("of", [loss, negative_log, by_hand])
def test_dropout_on_what_is_compared_is_seen(of: Any) -> None:
    dropped = setup(model=ends_in(nn.Dropout(0.5)), loss=of)
    (fact,) = asked("dropout-on-outputs", dropped).facts
    assert fact.place.startswith("dropout in '3'") and fact.numbers["rate"] == 0.5
    fork = dropped.fork()
    FIXES["outputs-without-dropout"].apply(fork)
    plain = setup(model=ends_in(nn.Identity()), loss=of)
    assert train(fork).losses == train(plain.fork()).losses
    assert asked("dropout-on-outputs", plain) == Probed()
    with pytest.raises(DoesNotApply):
        FIXES["outputs-without-dropout"].apply(plain.fork())


def test_dropout_on_outputs_is_named_and_other_dropout_is_not() -> None:
    assert "dropout-on-outputs" in named(setup(model=ends_in(nn.Dropout(0.3))))
    before = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
    assert "dropout-on-outputs" not in named(setup(model=before))
    assert asked("dropout-on-outputs", setup(model=ends_in(nn.Dropout(0.0)))) == Probed()


def test_dropout_on_a_residual_branch_is_none_on_the_outputs() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.drop = nn.Linear(12, 12), nn.Dropout(0.2)

        def forward(self, x: Tensor) -> Tensor:
            z = self.layer(x)
            return z + self.drop(z.relu())

    def restored(model: nn.Module, batch: Any) -> Tensor:
        return functional.mse_loss(model(batch[0]), batch[0])

    assert asked("dropout-on-outputs", setup(model=Residual(), loss=restored)) == Probed()


@pytest.mark.parametrize("last", [nn.BatchNorm1d(1), nn.Sequential(nn.BatchNorm1d(1), nn.ReLU())])
def test_normalised_outputs_are_named_where_the_targets_are_not(last: nn.Module) -> None:
    def of(scale: float, shift: float, end: nn.Module = last) -> Setup:
        by = partial(squared, scale=scale, shift=shift)
        return setup(model=ends_in(end, 1), loss=by)

    (fact,) = asked("outputs-normalised", of(30.0, 100.0)).facts
    assert abs(fact.numbers["mean"]) < 0.5 < fact.numbers["std"] < 1.1
    assert "outputs-normalised" in named(of(30.0, 100.0))
    assert "outputs-normalised" not in named(of(1.0, 0.0)), "the targets are standardised"
    assert asked("outputs-normalised", of(30.0, 100.0, nn.ReLU())) == Probed()
    fork = of(30.0, 100.0, nn.BatchNorm1d(1)).fork()
    FIXES["outputs-without-norm"].apply(fork)
    assert train(fork).losses == train(of(30.0, 100.0, nn.Identity()).fork()).losses
    with pytest.raises(DoesNotApply):
        FIXES["outputs-without-norm"].apply(of(30.0, 100.0, nn.ReLU()).fork())


class Rescaled(nn.Module):
    """Puts normalised outputs back into the targets' units."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1)

    def forward(self, x: Tensor) -> Tensor:
        return 30.0 * self.norm(x) + 100.0


def test_normalised_outputs_in_the_units_of_the_targets_are_no_fault() -> None:
    by = partial(squared, scale=30.0, shift=100.0)
    of = setup(model=ends_in(Rescaled(), 1), loss=by)
    (fact,) = asked("outputs-normalised", of).facts
    assert fact.numbers["mean"] == pytest.approx(100.0)
    assert "outputs-normalised" not in named(of)


def test_normalised_logits_are_no_fault() -> None:
    assert asked("outputs-normalised", setup(model=ends_in(nn.BatchNorm1d(3)))) == Probed()


# Loss


def with_itself(model: nn.Module, batch: Any) -> Tensor:
    z = model(batch[0])
    return functional.mse_loss(z, z.detach())


def satisfied(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]).square().mean() - 1e4).relu()


def test_a_loss_without_a_gradient_is_named_with_its_place() -> None:
    assert asked("zero-gradient", setup(loss=with_itself)).facts[0].place.startswith("mse_loss (")
    assert asked("zero-gradient", setup(loss=satisfied)) == Probed()
    assert named(setup(loss=with_itself))["zero-gradient"] == "act"
    assert named(setup(loss=satisfied))["zero-gradient"] == "act"
    assert "zero-gradient" not in named(setup())


def of_outputs(change: Callable[[Tensor], Tensor], lower: float = 0.0) -> Setup:
    """A regression on the outputs of a function."""

    def squared(model: nn.Module, batch: Any) -> Tensor:
        return functional.mse_loss(change(model(batch[0])), functional.one_hot(batch[1], 3).float())

    model = mlp()
    with torch.no_grad():
        model[2].bias -= lower
    return setup(model=model, loss=squared)


@pytest.mark.parametrize(
    ("change", "lower", "kind"),
    [(torch.round, 0.0, "step"), (lambda z: torch.sign(z.tanh()), 0.0, "step"),
     (lambda z: z + (z.round() - z).detach(), 0.0, ""), (torch.tanh, 2.0, ""),
     (lambda z: z.clamp(0, 1), 4.0, "clip"),
     (lambda z: z.sigmoid().clamp(1e-7, 1 - 1e-7), 0.0, ""), (lambda z: z - z.clamp(0, 1), 4.0, ""),
     (lambda z: functional.leaky_relu(z), 4.0, ""), (lambda z: 0.0 * z, 4.0, ""),
     (lambda z: torch.where(torch.zeros(3, dtype=torch.bool), z, 0.0), 4.0, ""),
     (lambda z: z.sign() * z.abs().log1p(), 0.0, ""),
     (lambda z: z.round() + z - z.detach(), 0.0, "")],
)  # fmt: skip
def test_functions_that_stop_the_gradient_are_named(
    change: Callable[[Tensor], Tensor], lower: float, kind: str
) -> None:
    of = of_outputs(change, lower)
    facts = asked("zero-slope", of).facts
    stuck = [fact.words["kind"] for fact in facts if fact.numbers.get("share", 1.0) > STUCK]
    assert stuck == ([kind] if kind else [])
    strength = named(of).get("zero-slope")
    assert strength == ("act" if kind else None)


def test_a_condition_on_the_outputs_is_a_clip() -> None:
    (fact,) = asked("zero-slope", of_outputs(lambda z: torch.where(z > 0, z, 0.0), 0.5)).facts
    assert fact.words["kind"] == "clip" and fact.numbers["share"] > STUCK


def test_margins_and_hidden_clips_are_left_alone() -> None:
    def margin(model: nn.Module, batch: Any) -> Tensor:
        return functional.relu(0.1 - model(batch[0]).gather(1, batch[1][:, None])).mean()

    (fact,) = asked("zero-slope", setup(loss=margin)).facts
    assert fact.words["kind"] == "clip" and fact.numbers["share"] == 0.0
    assert asked("zero-slope", setup()) == Probed()


class Cosines(nn.Module):
    """Cosines of features and one weight for each class: a layer whose weight is normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 16))

    def forward(self, x: Tensor) -> Tensor:
        cosines = functional.normalize(x, dim=-1) @ functional.normalize(self.weight, dim=-1).T
        return 20.0 * cosines


def test_an_activation_before_a_normalised_weight_is_hidden() -> None:
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), Cosines())
    assert asked("zero-slope", setup(model=model)) == Probed()


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_losses_that_are_multiplied_by_zero_are_left_alone(weight: float) -> None:
    def masked(model: nn.Module, batch: Any) -> Tensor:
        z = model(batch[0])
        losses = functional.cross_entropy(z, batch[1], reduction="none")
        mask = torch.full((len(z),), weight)
        return (losses * mask).mean() + (z.square() * (1 - weight)).mean()

    assert asked("zero-slope", setup(loss=masked)) == Probed()


@pytest.mark.parametrize(("samples", "is_told"), [(1, False), (2, False), (3, True)])
def test_few_entries_are_no_clip(samples: int, is_told: bool) -> None:
    def squared(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch[0][:samples]).clamp(0, 1) - 1).square().mean()

    facts = asked("zero-slope", setup(loss=squared)).facts
    assert [fact.words["kind"] for fact in facts] == (["clip"] if is_told else [])


def indexed(z: Tensor) -> Tensor:
    """Each row becomes the first, by a list that changes afterwards."""
    rows = [0] * len(z)
    made = z[rows]
    rows.append(len(z))
    return made


@pytest.mark.parametrize(
    "other",
    [lambda z: torch.complex(z, z).abs(), lambda z: z.to(torch.cfloat).conj().real,
     lambda z: z.to_sparse().to_dense(), indexed],
)  # fmt: skip
def test_a_call_that_cannot_be_examined_hides_no_other(other: Callable[[Tensor], Tensor]) -> None:
    def rounded(model: nn.Module, batch: Any) -> Tensor:
        z = model(batch[0])
        return ((2 * z).round() - other(3 * z)).square().mean()

    (fact,) = asked("zero-slope", setup(loss=rounded)).facts
    assert fact.words["kind"] == "step" and fact.place.startswith("round")


def test_stopped_targets_of_other_features_are_compared_with_others() -> None:
    def straight_through(model: nn.Module, batch: Any) -> Tensor:
        z = model(batch[0])
        q = z + (z.round() - z).detach()
        return functional.mse_loss(q, z.detach()) + functional.cross_entropy(q, batch[1])

    assert asked("zero-gradient", setup(loss=straight_through)) == Probed()


# The optimizer's epsilon

Made = Callable[[nn.Module], Optimizer]


def adam(eps: float, **settings: Any) -> Made:
    return lambda model: Adam(model.parameters(), lr=3e-3, eps=eps, **settings)


def trained(optimizer: Made, of: Any = loss) -> Probed:
    bed = setup(optimizer=optimizer, loss=of)
    fork = bed.fork()
    train(fork)
    return answer("epsilon-dominates", bed, fork)


def tiny(model: nn.Module, batch: Any) -> Tensor:
    return 1e-9 * loss(model, batch)


@pytest.mark.parametrize(
    "optimizer",
    [adam(1.0), adam(1.0, amsgrad=True), lambda m: AdamW(m.parameters(), eps=0.5),
     lambda m: RMSprop(m.parameters(), lr=1e-3, eps=1.0),
     lambda m: torch.optim.Adagrad(m.parameters(), lr=1e-3, eps=5.0)],
)  # fmt: skip
def test_an_epsilon_above_the_roots_is_seen(optimizer: Made) -> None:
    (fact,) = trained(optimizer).facts
    assert fact.numbers["share"] > 0.9 and fact.numbers["root"] < fact.numbers["epsilon"]


def test_the_mean_of_squared_gradients_is_corrected_for_its_bias() -> None:
    """Of gradients that are all 0.5, the root is 0.5 after any number of steps."""

    def of_sum(model: nn.Module, batch: Any) -> Tensor:
        return sum(0.5 * p.sum() for p in model.parameters())  # type: ignore[return-value]

    assert trained(adam(0.49), of_sum) == Probed()
    (fact,) = trained(adam(0.51), of_sum).facts
    assert fact.numbers == {"share": 1.0, "epsilon": 0.51, "root": pytest.approx(0.5)}
    (fact,) = trained(lambda m: RMSprop(m.parameters(), eps=0.49), of_sum).facts
    assert fact.numbers["root"] == pytest.approx(0.5 * (1 - 0.99**24) ** 0.5), "not corrected"


@pytest.mark.parametrize(
    ("optimizer", "of"),
    [(adam(1e-8), loss), (adam(1e-8), tiny), (adam(1e-7), loss),
     (lambda m: torch.optim.Adadelta(m.parameters(), eps=1.0), loss),
     (lambda m: torch.optim.SGD(m.parameters(), lr=0.1), loss)],
)  # fmt: skip
def test_usual_epsilons_and_optimizers_without_one_are_no_fault(optimizer: Made, of: Any) -> None:
    assert trained(optimizer, of) == Probed()


def test_the_epsilon_becomes_the_usual_one() -> None:
    of = setup(optimizer=adam(1.0), batches=batches())
    assert named(of)["epsilon-dominates"] in ("act", "watch")
    assert "epsilon-dominates" not in named(setup(optimizer=adam(1e-8)))
    fork = of.fork()
    FIXES["usual-epsilon"].apply(fork)
    assert train(fork).losses == train(setup(optimizer=adam(1e-8)).fork()).losses
    with pytest.raises(DoesNotApply):
        FIXES["usual-epsilon"].apply(setup(model=mlp()).fork())
