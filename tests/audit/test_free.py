"""Outputs of free choice in place of the model's, weights of the loss, and repeated seeds."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from trial_setups import answer, batches, loss, setup

from adiv_monitor.audit.training.setup import Setup
from adiv_monitor.diagnosis.faults.loss import IN_VAIN, ITSELF
from adiv_monitor.diagnosis.record import Fact


def facts(name: str, of: Setup) -> tuple[Fact, ...]:
    found = answer(name, of, of.fork())
    assert not found.untold
    return found.facts


def contrast(model: nn.Module, batch: Any, scale: float) -> Tensor:
    views = [functional.normalize(model(batch[0] + d), dim=1) for d in (0.0, 0.1)]
    return functional.cross_entropy(scale * views[0] @ views[1].T, torch.arange(len(batch[0])))


def dice(model: nn.Module, batch: Any, smooth: float) -> Tensor:
    p, t = model(batch[0]).softmax(1), functional.one_hot(batch[1], 3)
    both, every = (p * t).sum(0), (p + t).sum(0)
    return (1 - (2 * both + smooth) / (every + smooth)).mean()


def smoothed(model: nn.Module, batch: Any, by: float) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1], label_smoothing=by)


def bounded(model: nn.Module, batch: Any, mean: float) -> Tensor:
    return functional.mse_loss(2 * model(batch[0])[:, 0].tanh(), mean + batch[0][:, 0].tanh())


@pytest.mark.parametrize(
    ("of", "bad", "good"),
    [(contrast, 0.1, 10.0), (dice, 1e6, 1.0), (smoothed, 0.9, 0.1), (bounded, 40.0, 0.0)],
)
def test_a_loss_that_no_outputs_lower(
    of: Callable[[nn.Module, Any, float], Tensor], bad: float, good: float
) -> None:
    for value, hits in ((bad, True), (good, False)):
        (fact,) = facts("outputs-in-vain", setup(loss=lambda m, b, v=value: of(m, b, v)))
        assert (fact.numbers["share"] > IN_VAIN) is hits


def test_free_outputs_reach_the_least_squares_exactly() -> None:
    of = setup(loss=lambda m, b: (m(b[0]) - 5).square().mean() + 0.25)
    (fact,) = facts("outputs-in-vain", of)
    assert fact.numbers["lowest"] == pytest.approx(0.25, abs=1e-5)
    assert fact.numbers["zeros"] == pytest.approx(25.25)


def test_the_users_model_and_random_numbers_stay_as_they_are() -> None:
    of, state = setup(), torch.get_rng_state()
    before = [p.clone() for p in of.model.parameters()]
    for name in ("outputs-in-vain", "weighs-itself", "seed-again"):
        answer(name, of, of.fork())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, of.model.parameters(), before))


class Queued(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(12, 8)
        self.register_buffer("queue", functional.normalize(torch.randn(16, 8), dim=1))

    def forward(self, x: Tensor) -> Tensor:
        return functional.normalize(self.layer(x), dim=1)


def queued(model: Any, batch: Any) -> Tensor:
    query, key = model(batch[0]), functional.normalize(batch[0][:, :8], dim=1)
    before = model.queue.clone()
    model.queue[: len(key)] = key[:16]
    logits = torch.cat([(query * key).sum(1, keepdim=True), query @ before.T], 1)
    return functional.cross_entropy(logits / 0.1, torch.zeros(len(query), dtype=torch.long))


def test_a_queue_that_the_loss_fills_begins_anew_each_time() -> None:
    (fact,) = facts("outputs-in-vain", setup(model=Queued(), loss=queued))
    assert fact.numbers["share"] < 0.1


class Weighed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.heads = nn.ModuleList([nn.Linear(12, 3), nn.Linear(12, 1)])
        self.weights = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [head(x) for head in self.heads]


def terms(model: nn.Module, batch: Any) -> Tensor:
    logits, value = model(batch[0])
    wanted = batch[0].mean(1, keepdim=True)
    return torch.stack(
        [functional.cross_entropy(logits, batch[1]), functional.mse_loss(value, wanted)]
    )


@pytest.mark.parametrize(
    ("joined", "hits"),
    [
        (lambda w, of: (of * torch.exp(-w)).sum(), True),
        (lambda w, of: (of * functional.softplus(w)).sum(), True),
        (lambda w, of: (of * torch.exp(-w) + w).sum(), False),
        (lambda w, of: (of * w.softmax(0)).sum(), False),
        (lambda w, of: of.sum(), False),
    ],
)
def test_weights_of_terms_with_nothing_that_holds_them(joined: Any, hits: bool) -> None:
    of = setup(model=Weighed(), loss=lambda m, b: joined(m.weights, terms(m, b)))
    shares = [fact.numbers["share"] for fact in facts("weighs-itself", of)]
    assert any(share < ITSELF for share in shares) is hits


def test_factors_beside_the_last_layer_are_no_weights_of_terms() -> None:
    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.factor = nn.Linear(12, 3), nn.Parameter(torch.randn(3, 12))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + x @ self.factor.T

    model = nn.Sequential(Beside())
    assert not facts("weighs-itself", setup(model=model))


def seeds(model: nn.Module, batch: Any) -> Tensor:
    torch.manual_seed(3)
    return loss(model, batch)


def seeds_apart(model: nn.Module, batch: Any) -> Tensor:
    own = torch.randn(12, generator=torch.Generator().manual_seed(3))
    return loss(model, (batch[0] + own, batch[1]))


def restores(model: nn.Module, batch: Any) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return loss(model, batch)


@pytest.mark.parametrize(
    ("of", "hits"), [(seeds, True), (seeds_apart, False), (restores, False), (loss, False)]
)
def test_a_seed_that_is_set_in_each_step(of: Any, hits: bool) -> None:
    assert bool(facts("seed-again", setup(loss=of))) is hits


# Places and samples that never count


def maps() -> tuple[Any, ...]:
    chance = torch.Generator().manual_seed(0)
    return tuple(
        (torch.randn(6, 3, 8, 8, generator=chance),
         torch.randint(0, 3, (6, 8, 8), generator=chance))
        for _ in range(4)
    )  # fmt: skip


def of_corner(model: nn.Module, batch: Any, size: int) -> Tensor:
    logits = model(batch[0])[..., :size, :size]
    return functional.cross_entropy(logits, batch[1][..., :size, :size])


def unread(of: Any, **changes: Any) -> list[str]:
    bed = setup(loss=of, **changes)
    found = answer("class-untaught", bed, bed.fork()).facts
    return [fact.words["of"] for fact in found if "unread" in fact.numbers]


@pytest.mark.parametrize(("size", "hits"), [(3, True), (7, False), (8, False)])
def test_places_that_never_count(size: int, hits: bool) -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(3, 3, 3, padding=1)
    found = unread(lambda m, b: of_corner(m, b, size), model=model, batches=maps())
    assert found == ["places along axis 2", "places along axis 3"] * hits


@pytest.mark.parametrize(("frames", "hits"), [(4, True), (12, False)])
def test_lengths_that_leave_most_of_the_outputs_out(frames: int, hits: bool) -> None:
    chance = torch.Generator().manual_seed(0)
    data = tuple((torch.randn(4, 12, 12, generator=chance),
                  torch.randint(1, 3, (4, 2), generator=chance)) for _ in range(2))  # fmt: skip

    def of(model: nn.Module, batch: Any) -> Tensor:
        said = model(batch[0]).log_softmax(-1).transpose(0, 1)
        lengths = (torch.full((4,), n) for n in (frames, 2))
        return functional.ctc_loss(said, batch[1], *lengths, zero_infinity=True)

    assert unread(of, batches=data) == ["places along axis 1"] * hits


def test_a_loss_of_the_first_sample_alone_and_one_place_that_is_chosen() -> None:
    assert unread(lambda m, b: loss(m, (b[0][:32], b[1]))) == []

    def of_first(model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch[0])[:1], batch[1][:1])

    assert unread(of_first) == ["samples of a batch"]
    data = tuple((x[:, None].expand(-1, 5, -1), y) for x, y in batches())
    last = lambda m, b: functional.cross_entropy(m(b[0])[:, -1], b[1])  # noqa: E731
    assert unread(last, batches=data) == []


# Stored actions, and others that are drawn


@pytest.mark.parametrize("kind", ["discrete", "continuous"])
@pytest.mark.parametrize("anew", [True, False])
def test_actions_that_are_drawn_again(kind: str, anew: bool) -> None:
    chance, of_kind = torch.Generator().manual_seed(0), torch.distributions.Categorical
    actions = torch.randint(0, 3, (32,), generator=chance)
    if kind == "continuous":
        actions, of_kind = torch.randn(32, 3, generator=chance), torch.distributions.Normal
    data = ((batches()[0][0], actions, torch.randn(32, generator=chance)),)

    def of(model: nn.Module, batch: Any) -> Tensor:
        made = model(batch[0])
        by = of_kind(logits=made) if kind == "discrete" else of_kind(made, 1.0)
        log = by.log_prob(by.sample() if anew else batch[1]).reshape(32, -1).sum(1)
        return -(log * batch[2]).mean()

    bed = setup(loss=of, batches=data)
    drawn = [f for f in answer("batch-part-unread", bed, bed.fork()).facts if "drawn" in f.words]
    assert [fact.numbers["unread"] for fact in drawn] == [1.0] * anew


def test_samples_that_are_rewarded_at_once_are_meant() -> None:
    def of(model: nn.Module, batch: Any) -> Tensor:
        by = torch.distributions.Categorical(logits=model(batch[0]))
        chosen = by.sample()
        return -(by.log_prob(chosen) * (chosen == batch[1])).mean()

    bed = setup(loss=of)
    assert answer("batch-part-unread", bed, bed.fork()).facts == ()
