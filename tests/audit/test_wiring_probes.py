"""Bugs of wiring and outputs: each is seen, and its healthy relatives are not."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from made_records import record
from torch import Tensor, nn
from torch.nn import functional
from trial_setups import answer, loss, setup

from adiv_monitor.audit.experiments.observe import observe
from adiv_monitor.audit.training.setup import Setup
from adiv_monitor.audit.training.train import train
from adiv_monitor.audit.trials.fixes import FIXES, DoesNotApply
from adiv_monitor.diagnosis import diagnose
from adiv_monitor.diagnosis.record import Fact, Probed


def asked(name: str, of: Setup) -> Probed:
    return answer(name, of, of.fork())


def named(of: Setup) -> dict[str, str]:
    """Return the findings of a short run, of which nothing is tried, with their strengths."""
    return {
        finding.name: finding.strength
        for finding in diagnose(observe(replace(of, steps=12), every_n_steps=6))
    }


def strengths(name: str, *facts: Fact) -> list[str]:
    """Return the strengths of the findings about these facts in an else healthy run."""
    found = diagnose(record(probed={name: Probed(facts)}))
    return [finding.strength for finding in found if finding.name == name]


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


def slots(net: Attending, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Slots compete for places, and take means of what they got (Locatello et al. 2020)."""
    weights = scores(q, k).softmax(-2) + 1e-6
    return weights / weights.sum(-1, keepdim=True) @ v


def clusters(net: Attending, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each place is assigned to clusters, whose members are summed (Ying et al. 2018)."""
    assigned = net.logits(q).softmax(-1)
    return (assigned.transpose(-1, -2) @ v)[..., :4, :]


WRONG = [along(-2), masked(-2), einsum(2)]
RIGHT = [along(-1), masked(-1), einsum(3)]
OTHERS = [slots, clusters]


@pytest.mark.parametrize("attend", WRONG)
def test_weights_that_sum_to_1_along_another_axis_are_seen(attend: Weighing) -> None:
    (fact,) = asked("attention-axis", with_model(Attending(attend))).facts
    assert fact.place.startswith("softmax (test_wiring_probes.py:")
    assert fact.words["axis"] != fact.words["over"]
    assert strengths("attention-axis", fact) == ["watch"]


@pytest.mark.parametrize("attend", [*RIGHT, *OTHERS])
def test_other_ways_to_weigh_are_no_fault(attend: Weighing) -> None:
    assert asked("attention-axis", with_model(Attending(attend))) == Probed()


# Constant outputs


def hidden(*layers: nn.Module, last: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), *layers, last or nn.Linear(16, 3))


def of_scale(layer: nn.Module, scale: float) -> nn.Module:
    nn.init.constant_(layer.weight, scale)  # type: ignore[arg-type]
    return layer


class Branched(nn.Module):
    """A sum of features and a branch of them, in front of a last layer."""

    def __init__(self, branch: nn.Module, last: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.branch, self.last = nn.Linear(12, 16), branch, last

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(x)
        return self.last(z + self.branch(z))


@pytest.mark.parametrize(
    ("model", "place"),
    [(hidden(nn.GroupNorm(16, 16), nn.Sigmoid()), "1"),
     (hidden(nn.GroupNorm(4, 16), nn.Sigmoid()), ""),
     (hidden(of_scale(nn.BatchNorm1d(16), 0.0), nn.ReLU()), "1"),
     (hidden(of_scale(nn.BatchNorm1d(16), 0.1), nn.ReLU()), ""),
     (hidden(of_scale(nn.Linear(16, 1), 0.1), nn.Sigmoid(), of_scale(nn.Linear(1, 16), -9.0),
             nn.ReLU()), "4"),
     (Branched(of_scale(nn.LayerNorm(16), 0.0), nn.Linear(16, 3)), ""),
     (Branched(nn.GroupNorm(16, 16), nn.Identity()), ""),
     (hidden(last=of_scale(nn.Linear(16, 3), 0.0)), ""),],
    ids=["norm", "groups", "weight", "small weight", "zeros", "branch", "constant branch",
         "last layer"],
)  # fmt: skip
def test_outputs_that_are_the_same_for_all_samples_are_named(model: nn.Module, place: str) -> None:
    """Branches and last layers may begin at zero; ignored inputs have their own finding."""
    found = asked("outputs-constant", with_model(model)).facts
    assert [fact.place for fact in found] == ([place] if place else [])
    assert strengths("outputs-constant", *found) == (["watch"] if place else [])


class Pair(nn.Module):
    """A part that a loss of two views calls by itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 8))


def views(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    x, net = batch[0], model.net
    return net(x + 0.3 * torch.randn_like(x)), net(x + 0.3 * torch.randn_like(x))


def towards(a: Tensor, b: Tensor) -> Tensor:
    return -functional.cosine_similarity(a, b).mean()


def alike(model: nn.Module, batch: Any) -> Tensor:
    return towards(*views(model, batch))


def with_negatives(model: nn.Module, batch: Any) -> Tensor:
    a, b = (functional.normalize(z) for z in views(model, batch))
    return functional.cross_entropy(a @ b.T / 0.1, torch.arange(len(a)))


def classified(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(views(model, batch)[0], batch[1])


@pytest.mark.parametrize(
    ("of_views", "is_named"), [(alike, True), (with_negatives, False), (classified, False)]
)
def test_outputs_that_collapse_are_told_where_the_loss_keeps_none_apart(
    of_views: Any, is_named: bool
) -> None:
    of = setup(model=Pair(), loss=of_views)
    trained = of.fork()
    assert answer("collapsed", of, trained) == Probed()
    with torch.no_grad():
        trained.model.net[2].weight *= 1e-3  # type: ignore[index, operator, union-attr]
    found = answer("collapsed", of, trained)
    assert bool(found.facts) is is_named and not found.untold
    assert strengths("collapsed", *found.facts) == ["act"] * is_named


# Evaluation mode


class Calls(nn.Module):
    """Calls a function of hidden features and of itself."""

    def __init__(self, function: Callable[[Tensor, Any], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function, self.drop = function, nn.Dropout(0.5)
        self.inner, self.head = nn.Linear(12, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.function(self.inner(x).relu(), self))


def attended(x: Tensor, rate: float) -> Tensor:
    x = x.unflatten(1, (4, 4))
    return functional.scaled_dot_product_attention(x, x, x, dropout_p=rate).flatten(1)


@pytest.mark.parametrize(
    ("drops", "rates"),
    [
        (lambda x, model: functional.dropout(x, 0.5), [0.5]),
        (lambda x, model: torch.dropout(x, 0.5, True), [0.5]),
        (lambda x, model: attended(x, 0.5), [0.5]),
        (lambda x, model: functional.dropout(x, 0.5, model.training), []),
        (lambda x, model: model.drop(x), []),
        (lambda x, model: x + torch.randn_like(x), []),  # samples, as a VAE does
        (lambda x, model: attended(x, 0.5 * model.training), []),
        (lambda x, model: model.drop.train()(x), []),  # Monte-Carlo dropout
    ],
)
def test_dropout_in_evaluation_mode_is_watched_unless_it_is_meant(
    drops: Any, rates: list[float]
) -> None:
    found = asked("dropout-in-eval", with_model(Calls(drops))).facts
    assert [fact.numbers["rate"] for fact in found] == rates
    assert strengths("dropout-in-eval", *found) == ["watch"] * len(rates)


@pytest.mark.parametrize(
    ("options", "is_named"),
    [
        ({"momentum": 0.0}, True),
        ({"momentum": 0.001}, True),
        ({"momentum": 0.99}, True),
        ({}, False),
        ({"momentum": 0.01}, False),  # as EfficientNet's
        ({"momentum": None}, False),  # the mean of all batches
        ({"momentum": 0.99, "track_running_stats": False}, False),
    ],
)
def test_running_statistics_that_are_no_average_are_watched(options: Any, is_named: bool) -> None:
    norm = nn.BatchNorm1d(16, **options)
    found = asked("running-statistics", with_model(hidden(norm, nn.ReLU()))).facts
    assert [fact.place for fact in found] == ["1"] * is_named
    assert strengths("running-statistics", *found) == ["watch"] * is_named


# Outputs


def ends_in(last: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3), last)


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


class Residual(nn.Module):
    """A sum with a branch that drops entries."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(12, 12), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        z = self.layer(x)
        return z + self.drop(z.relu())


def test_dropout_on_outputs_is_named_and_other_dropout_is_not() -> None:
    assert "dropout-on-outputs" in named(setup(model=ends_in(nn.Dropout(0.3))))
    before = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
    restored = setup(
        model=Residual(), loss=lambda model, batch: functional.mse_loss(model(batch[0]), batch[0])
    )
    for of in (setup(model=before), setup(model=ends_in(nn.Dropout(0.0))), restored):
        assert asked("dropout-on-outputs", of) == Probed()


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


@pytest.mark.parametrize(
    ("change", "stops"),
    [(torch.round, True), (lambda z: torch.sign(z.tanh()), True),
     (lambda z: z + (z.round() - z).detach(), False), (torch.tanh, False),
     (lambda z: z.sign() * z.abs().log1p(), False), (lambda z: z.clamp(0, 1), False)],
)  # fmt: skip
def test_functions_that_stop_the_gradient_are_named(
    change: Callable[[Tensor], Tensor], stops: bool
) -> None:
    def squared(model: nn.Module, batch: Any) -> Tensor:
        return (change(model(batch[0])) - functional.one_hot(batch[1], 3)).square().mean()

    found = asked("zero-slope", setup(loss=squared)).facts
    assert strengths("zero-slope", *found) == ["watch"] * stops


def test_stopped_targets_of_other_features_are_compared_with_others() -> None:
    def straight_through(model: nn.Module, batch: Any) -> Tensor:
        z = model(batch[0])
        q = z + (z.round() - z).detach()
        return functional.mse_loss(q, z.detach()) + functional.cross_entropy(q, batch[1])

    assert asked("zero-gradient", setup(loss=straight_through)) == Probed()
