"""Forms of losses that do not fit the outputs or the targets: each beside its fixed twin."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from made_records import STILL, record
from torch import Tensor, nn
from torch.nn import functional
from trial_setups import answer, batches, setup

from adiv_monitor.audit.training.setup import Setup
from adiv_monitor.audit.training.train import train
from adiv_monitor.diagnosis import diagnose
from adiv_monitor.diagnosis.record import Fact, Probed

OfPair = Callable[[Tensor, Tensor], Tensor]


def with_loss(of: OfPair, target: Callable[[Tensor, Tensor], Tensor], **changes: Any) -> Setup:
    """A setup whose loss compares the outputs with targets of inputs and classes."""
    made = tuple((x, target(x, y)) for x, y in batches())
    return setup(batches=made, loss=lambda model, batch: of(model(batch[0]), batch[1]), **changes)


def asked(name: str, of: Setup, trained: bool = False) -> tuple[Fact, ...]:
    fork = of.fork()
    if trained:
        train(fork)
    return answer(name, of, fork).facts


def strengths(name: str, facts: tuple[Fact, ...], **values: Any) -> list[str]:
    found = diagnose(record(probed={name: Probed(facts)}, **values))
    return [finding.strength for finding in found if finding.name == name]


# Targets that the outputs can't reach


def values(x: Tensor, y: Tensor) -> Tensor:
    """Targets of three outputs, between −6 and 6."""
    return 6 * x[:, :3].sin()


def of_outputs(change: Callable[[Tensor], Tensor]) -> Setup:
    return with_loss(lambda z, y: functional.mse_loss(change(z), y), values)


def test_targets_beyond_the_range_of_the_function_on_the_outputs_are_found() -> None:
    (fact,) = asked("targets-out-of-range", of_outputs(lambda z: z.tanh().flatten().view(-1, 3)))
    assert (fact.words["low"], fact.words["high"]) == ("-1", "1") and fact.numbers["share"] > 0.3
    for within in (lambda z: z.clamp(-1, 1), lambda z: 1 - 2 * z.sigmoid()):
        (fact,) = asked("targets-out-of-range", of_outputs(within))
        assert (fact.words["low"], fact.words["high"]) == ("-1", "1")
    for reaching in (lambda z: 7 * z.tanh(), lambda z: z.tanh().mul_(9.0), lambda z: z.relu() - 8,
                     lambda z: z.clamp(-5.9, 5.9)):  # fmt: skip
        assert asked("targets-out-of-range", of_outputs(reaching)) == ()


def as_mask(x: Tensor, y: Tensor) -> Tensor:
    """A mask as it is read from a file: 0 and 255."""
    return 255.0 * (x[:, :3] > 0)


def test_targets_of_a_binary_cross_entropy_are_probabilities() -> None:
    of = nn.BCEWithLogitsLoss()
    facts = asked("targets-out-of-range", with_loss(of, as_mask))
    assert facts[0].numbers["share"] == pytest.approx(0.5, abs=0.2)
    assert facts[0].words["farthest"] == "255"
    assert strengths("targets-out-of-range", facts) == ["act"]
    assert asked("targets-out-of-range", with_loss(of, lambda x, y: as_mask(x, y) / 255)) == ()


def test_targets_that_a_mask_leaves_out_may_have_any_value() -> None:
    def known(x: Tensor, y: Tensor) -> Tensor:
        return several(x, y).masked_fill(x[:, 3:6] > 0.5, -1.0)

    def masked(z: Tensor, y: Tensor) -> Tensor:
        each = functional.binary_cross_entropy_with_logits(z, y, reduction="none")
        return each[y >= 0].mean()

    assert asked("targets-out-of-range", with_loss(masked, known)) == ()
    whole = functional.binary_cross_entropy_with_logits
    assert asked("targets-out-of-range", with_loss(whole, known)) != ()


def several(x: Tensor, y: Tensor) -> Tensor:
    """Any number of three classes."""
    return (x[:, :3] > 0).float()


def one_hot(x: Tensor, y: Tensor) -> Tensor:
    return functional.one_hot(y, 3).float()


def shares_of(z: Tensor, y: Tensor) -> Tensor:
    return functional.binary_cross_entropy(z.softmax(1), y)


@pytest.mark.parametrize("of", [shares_of, functional.cross_entropy])
def test_a_softmax_does_not_meet_targets_of_several_classes(of: OfPair) -> None:
    facts = asked("targets-out-of-range", with_loss(of, several))
    assert facts[0].numbers["share"] == pytest.approx(0.5, abs=0.2)
    acts = "watch" if of is functional.cross_entropy else "act"
    assert strengths("targets-out-of-range", facts, losses=STILL) == [acts]
    assert strengths("targets-out-of-range", facts) == ["watch"]
    assert asked("targets-out-of-range", with_loss(of, one_hot)) == ()


def test_a_sigmoid_meets_targets_of_several_classes() -> None:
    for of in (
        functional.binary_cross_entropy_with_logits,
        lambda z, y: functional.mse_loss(z.softmax(1)[:, 0], y[:, 0]),
        lambda z, y: -(y * z.log_softmax(1)).sum(1).mean(),  # a likelihood of counts
    ):
        assert asked("targets-out-of-range", with_loss(of, several)) == ()


# Logits in place of probabilities


def dice(p: Tensor, y: Tensor) -> Tensor:
    return 1 - (2 * (p * y).sum() + 1) / (p.sum() + y.sum() + 1)


def of_classes(of: OfPair) -> OfPair:
    return lambda z, y: of(z, functional.one_hot(y, 3))


def test_losses_of_probabilities_get_logits() -> None:
    name = "logits-as-probabilities"
    (fact,) = asked(name, with_loss(dice, several), trained=True)
    assert fact.numbers["at"] == pytest.approx(0, abs=0.02) and fact.numbers["beyond"] < -0.2
    assert fact.numbers["outside"] > 0.1
    assert strengths(name, (fact,)) == ["act"]
    assert asked(name, with_loss(lambda z, y: dice(z.sigmoid(), y), several), trained=True) == ()
    assert asked(name, with_loss(of_classes(dice), lambda x, y: y), trained=True)
    shares = of_classes(lambda z, y: dice(z.softmax(1), y))
    assert asked(name, with_loss(shares, lambda x, y: y), trained=True) == ()

    def close_to_a_pole(z: Tensor, y: Tensor) -> Tensor:
        return dice(z - z.mean() - (y.sum() + 0.9) / z.numel() if z.requires_grad else z, y)

    assert asked(name, with_loss(close_to_a_pole, several), trained=True)


@pytest.mark.parametrize(
    "of",
    [
        functional.binary_cross_entropy_with_logits,
        functional.mse_loss,
        lambda z, y: dice(z.clamp(0, 1), y),
        lambda z, y: 1 - functional.cosine_similarity(z, y + 1e-3).mean(),
        lambda z, y: -(y * (y - z).log()).sum(),  # NaN at the targets, and beyond
    ],
)
def test_other_losses_are_no_lower_beyond_the_targets(of: OfPair) -> None:
    assert asked("logits-as-probabilities", with_loss(of, several), trained=True) == ()


# Outputs and targets of different samples


class ByTime(nn.Module):
    """A recurrent network that returns time first, (T, B, classes)."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x.transpose(0, 1))[0])


def over_time(targets: Callable[[Tensor], Tensor]) -> Setup:
    torch.manual_seed(0)
    made = tuple((torch.randn(6, 5, 4), torch.randint(3, (6, 5))) for _ in range(4))

    def of(model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch[0]).flatten(0, 1), targets(batch[1]).flatten())

    return setup(model=ByTime(), batches=made, loss=of)


def test_axes_in_another_order_misplace_targets() -> None:
    (fact,) = asked("targets-misplaced", over_time(lambda y: y))
    assert fact.numbers["share"] <= 1 / 3, "only the first place of the first sample"
    assert strengths("targets-misplaced", (fact,)) == ["act"]
    (fact,) = asked("targets-misplaced", over_time(lambda y: y.t()))
    assert fact.numbers["share"] == 1 and strengths("targets-misplaced", (fact,)) == []


@pytest.mark.parametrize(
    "of",
    [
        lambda z, y: functional.nll_loss(z.log_softmax(0), y),
        lambda z, y: (torch.cdist(z, z) * (y[:, None] == y)).mean(),  # of pairs
    ],
)
def test_targets_may_concern_other_samples_too(of: OfPair) -> None:
    assert asked("targets-misplaced", with_loss(of, lambda x, y: y)) == ()


# Losses that reward what contradicts the targets


@pytest.mark.parametrize(
    "of",
    [
        lambda z, y: 1 - dice(z.sigmoid(), y),
        lambda z, y: -functional.binary_cross_entropy_with_logits(z, y),
        lambda z, y: functional.mse_loss(z.sigmoid(), 1 - y),
    ],
)
def test_a_loss_of_the_wrong_sign_prefers_wrong_outputs(of: OfPair) -> None:
    (fact,) = asked("loss-reversed", with_loss(of, several), trained=True)
    assert fact.numbers["wrong"] < fact.numbers["right"]
    assert strengths("loss-reversed", (fact,)) == ["act"]


@pytest.mark.parametrize(
    "of",
    [
        functional.mse_loss,
        lambda z, y: dice(z, y),
        lambda z, y: (1 - z * (2 * y - 1)).relu().mean(),
        lambda z, y: z.square().mean(),
    ],
)
def test_a_loss_that_prefers_right_outputs_or_none_is_no_finding(of: OfPair) -> None:
    assert asked("loss-reversed", with_loss(of, several)) == ()


def test_classes_of_the_wrong_sign_and_distances() -> None:
    wrong = with_loss(lambda z, y: -functional.cross_entropy(z, y), lambda x, y: y)
    assert strengths("loss-reversed", asked("loss-reversed", wrong, trained=True)) == ["act"]
    assert asked("loss-reversed", with_loss(functional.cross_entropy, lambda x, y: y)) == ()

    def contrastive(d: Tensor, same: Tensor) -> Tensor:
        return (same * d.square() + (1 - same) * (1 - d).relu().square()).mean()

    model = nn.Sequential(nn.Linear(12, 3), nn.Softplus())
    of = with_loss(contrastive, several, model=model)
    distances = asked("loss-reversed", of, trained=True)
    assert strengths("loss-reversed", distances) == ["watch"]


@pytest.mark.parametrize(
    ("of", "is_wrong"),
    [
        (lambda z, y: functional.cosine_similarity(z, y).mean(), True),
        (lambda z, y: 1 - functional.cosine_similarity(z, y).mean(), False),
        (lambda z, y: functional.mse_loss(z + 2, 3 * y), False),
    ],
)
def test_a_likeness_to_numbers_that_is_minimised_is_named(of: OfPair, is_wrong: bool) -> None:
    numbers = with_loss(of, lambda x, y: x[:, :3].contiguous())
    found = asked("loss-reversed", numbers, trained=True)
    assert strengths("loss-reversed", found) == ["act"] * is_wrong
    signs = with_loss(lambda z, y: (z * y).mean(), lambda x, y: x[:, :3].sign())
    assert asked("loss-reversed", signs, trained=True) == (), "a critic may call the real ones -1"


# Labels that a loss keeps for itself


class ActorCritic(nn.Module):
    """Gives logits of actions and an estimate of the reward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.actor, self.critic = nn.Linear(12, 3), nn.Linear(12, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(x), self.critic(x)[:, 0]


def sampled(given: tuple[Tensor, Tensor], y: Tensor, sign: int) -> Tensor:
    """The loss of A2C: actions are drawn, and rewarded if they are the class."""
    z, value = given
    policy = torch.distributions.Categorical(logits=z)
    action = policy.sample()
    reward = (action == y).float()
    of_policy = -(policy.log_prob(action) * (reward - value).detach()).mean()
    return sign * of_policy + (reward - value).square().mean()


@pytest.mark.parametrize(("sign", "is_found"), [(1, False), (-1, True)])
def test_a_surrogate_that_teaches_right_outputs_is_no_finding(sign: int, is_found: bool) -> None:
    """Its value is higher for right outputs at either sign, and its gradient right at one."""
    of = with_loss(partial(sampled, sign=sign), lambda x, y: y, model=ActorCritic())  # type: ignore[arg-type]
    assert bool(asked("loss-reversed", of, trained=True)) is is_found


# Shapes that are broadcast


def one_value(of: OfPair, target: Callable[[Tensor, Tensor], Tensor]) -> Setup:
    return with_loss(
        of, target, model=nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 1))
    )


def signs(x: Tensor, y: Tensor) -> Tensor:
    return 2.0 * (y % 2) - 1


def margin(z: Tensor, y: Tensor) -> Tensor:
    return (1 - z * y).relu().mean()


def test_a_product_of_outputs_and_targets_of_other_samples_is_found() -> None:
    facts = asked("broadcast-loss", one_value(margin, signs))
    assert facts and {fact.numbers["times"] for fact in facts} == {32.0}
    assert strengths("broadcast-loss", facts)[0] == "act"
    assert asked("broadcast-loss", one_value(lambda z, y: margin(z[:, 0], y), signs)) == ()


def pairs(z: Tensor, y: Tensor) -> Tensor:
    """Return a ranking loss of all pairs of samples."""
    above = (y[:, None] > y).float()
    return (functional.softplus(z.T - z) * above).mean()


@pytest.mark.parametrize(
    "of",
    [
        pairs,
        lambda z, y: (z.expand(-1, 4) * torch.ones(4)).square().mean(),
        lambda z, y: z.square().mean() + 0 * ((z > 0) == (y > 0)).float().mean(),  # an accuracy
        lambda z, y: (torch.ones(32, 32) @ z[:, 0]).square().mean(),
    ],
)
def test_pairs_that_are_meant_are_no_finding(of: OfPair) -> None:
    assert asked("broadcast-loss", one_value(of, signs)) == ()


# Pairs, and terms of a loss that compare a tensor with itself


class Taught(nn.Module):
    """A student, which begins as a copy of its teacher."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.student, self.teacher = nn.Linear(12, 3), nn.Linear(12, 3).requires_grad_(False)
        self.teacher.load_state_dict(self.student.state_dict())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.student(x), self.teacher(x)


def test_a_term_that_compares_the_teacher_with_itself_is_named() -> None:
    def distilled(model: nn.Module, batch: Any, right: bool) -> Tensor:
        student, teacher = model(batch[0])
        given = (student if right else teacher).log_softmax(1)
        soft = functional.kl_div(given, teacher.softmax(1), reduction="batchmean")
        return soft + 0.1 * functional.cross_entropy(student, batch[1])

    for right in (False, True):
        of = setup(model=Taught(), loss=partial(distilled, right=right))
        facts = asked("zero-gradient", of, trained=True)
        assert bool(facts) is not right
        assert strengths("zero-gradient", facts) == ([] if right else ["act"])
