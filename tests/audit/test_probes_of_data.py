"""What counts in the loss, and which data differ: each case beside a healthy relative."""

from functools import partial
from typing import Any

import pytest
import torch
from made_records import STILL, record
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Adam, Optimizer
from trial_setups import answer, batches, setup

from adiv_monitor.audit.training.setup import Setup
from adiv_monitor.audit.training.train import train
from adiv_monitor.diagnosis import diagnose
from adiv_monitor.diagnosis.finding import Finding
from adiv_monitor.diagnosis.record import Fact, Probed


def told(name: str, of: Setup, trained: bool = False) -> Probed:
    """The answer of one probe, of a copy that was trained or not."""
    fork = of.fork()
    if trained:
        train(fork)
    return answer(name, of, fork)


def found(name: str, *facts: Fact, **values: Any) -> list[Finding]:
    made = record(probed={name: Probed(facts)}, **values)
    return [finding for finding in diagnose(made) if finding.name == name]


def strengths(name: str, *facts: Fact, **values: Any) -> list[str]:
    return [finding.strength for finding in found(name, *facts, **values)]


# Weights of classes


def weighted(weight: tuple[float, ...]) -> Setup:
    """Class 2 is ten times as rare as the others."""
    rare = [(x, torch.where(torch.arange(32) % 16 == 0, 2, y % 2)) for x, y in batches()]

    def of(model: nn.Module, batch: Any) -> Tensor:
        given = torch.tensor(weight)
        return functional.cross_entropy(model(batch[0]), batch[1], weight=given)

    return setup(batches=tuple(rare), loss=of)


@pytest.mark.parametrize(
    ("weight", "is_named"),
    [
        ((8.0, 8.0, 1.0), True),  # counts in place of their inverses
        ((1.0, 1.0, 3.0), False),  # the square root of the inverses
        ((0.0, 1.0, 1.0), False),  # left out on purpose
    ],
)
def test_weights_that_grow_with_the_counts_are_named(
    weight: tuple[float, ...], is_named: bool
) -> None:
    facts = told("class-weights", weighted(weight)).facts
    assert bool(found("class-weights", *facts)) is is_named


# Classes without a gradient


def two(change: Any, of: Any) -> Setup:
    made = tuple((x, change(y % 2)) for x, y in batches())
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 1))

    def one(model: nn.Module, batch: Any) -> Tensor:
        return of(model(batch[0])[:, 0], batch[1].float()).mean()

    return setup(model=model, batches=made, loss=one)


def hinge(output: Tensor, y: Tensor) -> Tensor:
    return (1 - output * y).relu()


def test_labels_that_a_loss_does_not_expect_teach_nothing() -> None:
    (fact,) = told("class-untaught", two(lambda y: y, hinge), trained=True).facts
    assert fact.numbers["label"] == 0.0 and fact.numbers["samples"] > 64


@pytest.mark.parametrize(
    ("change", "of"),
    [
        (lambda y: 2 * y - 1, hinge),
        # Samples without a label, and a margin that all samples of a class keep after training.
        (lambda y: y - (torch.arange(32) % 4 == 0) * 5, lambda z, y: (z - y).square() * (y >= 0)),
        (lambda y: 2 * y - 1, lambda z, y: (0.1 - z * y).relu()),
    ],
    ids=["signs", "unlabelled", "learnt"],
)
def test_classes_that_were_taught_at_first_and_no_labels_are_left_alone(
    change: Any, of: Any
) -> None:
    assert told("class-untaught", two(change, of), trained=True) == Probed()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_weights_of_samples_are_no_labels(dtype: torch.dtype) -> None:
    weights = (torch.arange(32) % 4 > 0).to(dtype)
    made = tuple((x, y % 2, weights) for x, y in batches())
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 1))

    def of(model: nn.Module, batch: Any, each: Any = lambda z, y: (z - y).square()) -> Tensor:
        weighted = each(model(batch[0])[:, 0], batch[1].float()) * batch[2]
        return weighted.sum() / batch[2].sum()

    bed = setup(model=model, batches=made, loss=of)
    assert told("class-untaught", bed, trained=True) == Probed()
    (fact,) = told(
        "class-untaught",
        setup(model=model, batches=made, loss=partial(of, each=hinge)),
        trained=True,
    ).facts
    assert fact.numbers["label"] == 0.0


def test_booleans_are_masks_and_no_labels() -> None:
    def of_masked(model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch[0])[batch[1]], batch[2][batch[1]])

    chance = torch.Generator().manual_seed(0)
    given = [torch.randint(7, (4, 9), generator=chance) for _ in range(3)]
    made = tuple((x, torch.rand(4, 9, generator=chance) < 0.3, x % 4) for x in given)
    bed = setup(model=Tags(pixels=False), batches=made, loss=of_masked, optimizer=adam)
    assert told("class-untaught", bed, trained=True).facts == ()


class Tags(nn.Module):
    """Classes for each token, or for each pixel."""

    def __init__(self, *, pixels: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(7, 8)
        self.head = nn.Conv2d(1, 4, 1) if pixels else nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x if x.ndim == 4 else self.table(x))


def tagged(of: Any, labels: Any, *, pixels: bool = False) -> Probed:
    chance = torch.Generator().manual_seed(0)
    shape = (4, 1, 5, 5) if pixels else (4, 9)
    given = [torch.randint(7, shape, generator=chance) for _ in range(3)]
    made = tuple((x.float() if pixels else x, labels(x[:, 0] if pixels else x)) for x in given)
    bed = setup(model=Tags(pixels=pixels), batches=made, loss=of, optimizer=adam)
    return told("class-untaught", bed, trained=True)


def of_flat(ignored: int) -> Any:
    return lambda m, b: functional.cross_entropy(
        m(b[0]).flatten(0, 1), b[1].flatten(), ignore_index=ignored
    )


def of_pixels(m: nn.Module, b: Any) -> Tensor:
    return functional.cross_entropy(m(b[0]), b[1], ignore_index=0)


def of_chosen(m: nn.Module, b: Any) -> Tensor:
    return functional.cross_entropy(m(b[0])[b[1] > 0], b[1][b[1] > 0])


def filled(x: Tensor) -> Tensor:
    lengths = torch.tensor([[4], [9], [6], [7]])
    return torch.where(torch.arange(9) < lengths, x % 3 + 1, 0)


@pytest.mark.parametrize(
    ("of", "labels", "pixels", "is_told"),
    [
        (of_flat(0), lambda x: x % 4, False, True),
        (of_chosen, lambda x: x % 4, False, True),
        (of_pixels, lambda x: x % 4, True, True),
        (lambda m, b: (
            functional.cross_entropy(m(b[0]), b[1], reduction="none") * (b[1] > 0)).mean(),
         lambda x: x % 4, True, True),
        (of_flat(-100), lambda x: x % 4, False, False),
        (of_flat(0), filled, False, False),
        (of_flat(0), lambda x: filled(x).flip(1), False, False),
        (of_flat(-100), lambda x: torch.where(x % 4 > 0, x % 4, -100), False, False),
        (of_flat(0), lambda x: (x % 4) * (x > 4), False, False),
        (lambda m, b: next_ones(m, b[0]), lambda x: x, False, False),
    ],
    ids=["ignored", "chosen", "pixels", "mask", "all", "padding", "before", "-100", "unlabelled",
         "next tokens"],
)  # fmt: skip
def test_a_class_of_tokens_or_pixels_that_never_counts_is_told(
    of: Any, labels: Any, pixels: bool, is_told: bool
) -> None:
    facts = tagged(of, labels, pixels=pixels).facts
    assert [fact.numbers["label"] for fact in facts] == [0.0] * is_told


def next_ones(m: nn.Module, x: Tensor) -> Tensor:
    return functional.cross_entropy(m(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten() % 4)


# Padding


LINES = torch.tensor([[3, 1, 2, 0, 0], [2, 2, 4, 1, 0], [4, 0, 0, 0, 0], [1, 2, 0, 0, 0]])


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(5, 8), nn.Linear(8, 5)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.table(words))


def next_words(**settings: Any) -> Any:
    def of(model: nn.Module, batch: Any) -> Tensor:
        (words,) = batch
        flat = model(words[:, :-1]).flatten(0, 1)
        return functional.cross_entropy(flat, words[:, 1:].flatten(), **settings)

    return of


def masked(model: nn.Module, batch: Any) -> Tensor:
    (words,) = batch
    each = functional.cross_entropy(model(words).transpose(1, 2), words, reduction="none")
    return (each * (words > 0)).sum() / (words > 0).sum()


def shifted(model: nn.Module, batch: Any) -> Tensor:
    (words,) = batch
    labels = functional.pad(words[:, 1:], (0, 1), value=-100)
    return functional.cross_entropy(model(words).transpose(1, 2), labels)


def test_padding_counts_unless_it_is_ignored_or_masked() -> None:
    def of(a_loss: Any, lines: Tensor = LINES) -> Probed:
        return told("padding-counts", setup(model=Words(), batches=((lines,),), loss=a_loss))

    (fact,) = of(next_words()).facts
    assert fact.numbers["share"] == pytest.approx(6 / 16)
    assert of(next_words(), LINES.flip(1)).facts, "at the beginning"
    longer = functional.pad(LINES, (0, 6))
    assert of(shifted, longer).facts, "the last place, which has no next word, is ignored"
    assert not of(next_words(ignore_index=0)).facts
    assert not of(next_words(weight=torch.tensor([0.0, 1, 1, 1, 1]))).facts
    assert not of(masked).facts
    torch.manual_seed(0)
    assert not of(next_words(), torch.randint(5, (4, 8))).facts, "words that occur anywhere"
    ends = torch.tensor([[3, 1, 2, 0], [2, 2, 4, 0], [4, 1, 1, 0]])
    for lines in (ends, (LINES > 0).long(), LINES[:1].expand(4, 5)):
        assert not of(next_words(), lines).facts, "one sign for the end, a mask, a fixed end"


# Penalties


def with_penalty(weight: float) -> Setup:
    def of(model: nn.Module, batch: Any) -> Tensor:
        outputs = model(batch[0])
        return functional.cross_entropy(outputs, batch[1]) + weight * outputs.square().mean()

    return setup(loss=of, optimizer=adam)


def adam(model: nn.Module) -> Optimizer:
    return Adam(model.parameters(), lr=0.01)


def test_a_penalty_that_keeps_all_else_from_learning_is_named() -> None:
    (fact,) = told("penalty-dominates", with_penalty(100.0), trained=True).facts
    numbers = fact.numbers
    assert numbers["with"] < 0.1 * numbers["without"] and numbers["penalty"] > 0
    assert strengths("penalty-dominates", fact) == ["watch"]
    assert strengths("penalty-dominates", fact, losses=STILL) == ["act"]


@pytest.mark.parametrize(("weight", "grows"), [(10.0, True), (0.01, False)])
def test_a_spread_that_is_rewarded_for_its_own_sake_is_named(weight: float, grows: bool) -> None:
    def prized(model: nn.Module, batch: Any) -> Tensor:
        outputs = model(batch[0])
        return functional.mse_loss(outputs, batch[0][:, :3]) - weight * outputs.std()

    facts = told("penalty-dominates", setup(loss=prized, optimizer=adam), trained=True).facts
    said = [finding.summary for finding in found("penalty-dominates", *facts)]
    assert ["reward something for its own sake" in each for each in said] == [True] * grows


@pytest.mark.parametrize("taught_alone", [True, False])
def test_a_term_that_alone_teaches_some_parameters_is_no_penalty(taught_alone: bool) -> None:
    """Such as that of a codebook."""
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3))
    model.code = nn.Parameter(torch.ones(4), requires_grad=taught_alone)

    def of(model: nn.Module, batch: Any) -> Tensor:
        outputs = model(batch[0])
        penalty = 100.0 * outputs.square().mean() + model.code.square().mean()
        return functional.cross_entropy(outputs, batch[1]) + penalty

    facts = told("penalty-dominates", setup(model=model, loss=of, optimizer=adam), True).facts
    assert bool(found("penalty-dominates", *facts)) is not taught_alone


def test_a_small_penalty_and_two_tasks_are_left_alone() -> None:
    def tasks(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        outputs = model(x)
        total = functional.cross_entropy(outputs, y)
        total += 100.0 * functional.mse_loss(outputs[:, 0], x[:, 0])
        return total

    for of in (with_penalty(1e-3), setup(loss=tasks), setup()):
        facts = told("penalty-dominates", of, trained=True).facts
        assert not found("penalty-dominates", *facts)


# Data


def test_samples_that_repeat_within_a_batch_are_named() -> None:
    def again(rows: Tensor) -> Probed:
        return told("same-batch", setup(batches=tuple((x[rows], y[rows]) for x, y in batches())))

    (fact,) = again(torch.arange(32) % 4).facts
    assert fact.words["of"] == "samples" and fact.numbers["share"] == 4 / 32
    assert not again(torch.arange(32) % 20).facts
    bits = torch.arange(32)[:, None] // torch.tensor([1, 2]) % 2
    truths = tuple((bits.float(), bits.sum(1) % 2) for _ in range(3))
    table = setup(model=nn.Linear(2, 3), batches=truths)
    assert not told("same-batch", table).facts, "few whole numbers are equal by chance"
    states = tuple((functional.one_hot(y, 12).float(), y) for _, y in batches())
    assert not told("same-batch", setup(batches=states)).facts, "so are states that are one-hot"


# Batches that depend on the batch before, packed graphs, and parts that are never read


class Carries(nn.Module):
    """A recurrent network that begins with a state of the batch before, or with a fresh one."""

    def __init__(self, carries: bool = True) -> None:
        super().__init__()
        self.gru, self.head, self.carries = nn.GRU(1, 8, batch_first=True), nn.Linear(8, 1), carries
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        out, state = self.gru(x, self.state if self.carries else None)
        self.state = state.detach()
        return self.head(out)


class Queue(nn.Module):
    """Compares samples with those of the batch before, as contrastive learning does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.queue = nn.Linear(6, 4), nn.Buffer(torch.ones(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        z = self.layer(x[..., 0])
        scores = z @ self.queue.T
        self.queue = z.detach()
        return scores[..., None]


def series(shuffled: bool) -> tuple[Any, ...]:
    """Waves in windows of six: later ones go on, or are of other waves."""
    made = torch.Generator().manual_seed(0)
    phase = 6.28 * torch.rand(16, 1, generator=made)
    waves = [torch.sin(phase + 0.4 * torch.arange(6.0 * i, 6 * i + 7)) for i in range(4)]
    if shuffled:
        waves = [wave[torch.randperm(16, generator=made)] for wave in waves]
    return tuple((w[:, :6, None], w[:, 1:, None]) for w in waves)


@pytest.mark.parametrize(
    ("model", "shuffled", "strength"),
    [
        (Carries, True, ["act"]),
        (Carries, False, []),  # truncated backpropagation through time
        (partial(Carries, carries=False), True, []),
        (Queue, True, ["watch"]),
    ],
)
def test_a_state_that_belongs_to_other_samples_is_named(
    model: Any, shuffled: bool, strength: list[str]
) -> None:
    def of(model: nn.Module, batch: Any) -> Tensor:
        return functional.mse_loss(model(batch[0]).mean(1), batch[1].mean(1))

    facts = told("state-carried", setup(model=model(), batches=series(shuffled), loss=of)).facts
    assert strengths("state-carried", *facts, losses=STILL) == strength


def test_what_is_kept_on_purpose_is_a_note_where_the_loss_falls() -> None:
    assert strengths("state-carried", Fact("", {"outputs": 1.0}, {"of": "batch"})) == ["note"]
    running = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3))
    assert told("state-carried", setup(model=running)) == Probed()


class Packed(nn.Module):
    """The mean over each graph's nodes, or over all nodes of the batch."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        self.layer, self.head, self.apart = nn.Linear(5, 8), nn.Linear(8, 3), apart

    def forward(self, x: Tensor, graph: Tensor, count: int) -> Tensor:
        nodes = self.layer(x).relu()
        if not self.apart:
            return self.head(nodes.mean(0, keepdim=True)).expand(count, -1)
        sums = torch.zeros(count, 8).index_add(0, graph, nodes)
        return self.head(sums / graph.bincount()[:, None])


@pytest.mark.parametrize("apart", [True, False])
def test_packed_graphs_that_mix_are_named(apart: bool) -> None:
    def of(model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch[0], batch[1], len(batch[2])), batch[2])

    graph = torch.arange(6).repeat_interleave(torch.tensor([3, 5, 4, 6, 3, 4]))
    made = tuple((torch.randn(25, 5), graph, torch.arange(6) % 3) for _ in range(4))
    facts = told("samples-mixed", setup(model=Packed(apart), batches=made, loss=of)).facts
    assert strengths("samples-mixed", *facts, losses=STILL) == ["act"] * (not apart)


def test_a_view_that_the_loss_never_reads_is_named() -> None:
    def views(uses: tuple[int, int], change: Any = lambda x: x + 1) -> list[str]:
        def of(model: nn.Module, batch: Any) -> Tensor:
            one, other = (model(batch[i]) for i in uses)
            return functional.cross_entropy(one @ other.T, torch.arange(len(one)))

        made = tuple((x, change(x), y.float()) for x, y in batches())
        facts = told("batch-part-unread", setup(batches=made, loss=of)).facts
        return strengths("batch-part-unread", *facts, losses=STILL)

    assert views((0, 0)) == views((1, 1)) == ["watch"]
    assert views((0, 1)) == []
    assert views((0, 0), lambda x: x.clone()) == [], "the same again"
    assert views((0, 0), lambda x: x[:, :4]) == [], "of another shape"
    assert views((0, 0), lambda x: x.round().long()) == [], "numbers of samples, and the like"


def test_a_flag_of_samples_that_the_loss_never_reads_is_named() -> None:
    def of(model: nn.Module, batch: Any, masked: bool = False) -> Tensor:
        x, y, mask = batch
        each = functional.cross_entropy(model(x), y, reduction="none")
        return each[mask > 0].mean() if masked else each.mean()

    for kind in (torch.bool, torch.float32, torch.int64):
        made = tuple((x, y, (torch.arange(32) % 3 > 0).to(kind)) for x, y in batches())
        assert told("batch-part-unread", setup(batches=made, loss=of)).facts[0].numbers == {
            "unread": 2
        }
        read = setup(batches=made, loss=partial(of, masked=True))
        assert not told("batch-part-unread", read).facts
