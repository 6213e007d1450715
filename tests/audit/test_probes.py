"""What is asked of copies: each bug is named where it is planted, and not in its fixed twin."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from audit.fault_benchmark.reported import HELD_OUT, REPORTED, SET_BY, TWINS
from audit.fault_benchmark.run import Case, Healthy
from made_records import record as made_record
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)
from trial_setups import answer, batches, loss, mlp, setup

from adiv_monitor.audit.experiments.calls import Call
from adiv_monitor.audit.experiments.loss_inputs import given_to
from adiv_monitor.audit.experiments.observe import observe
from adiv_monitor.audit.experiments.questions import ASKS, LOOKS, asked
from adiv_monitor.audit.training.batches import taken
from adiv_monitor.audit.training.setup import Setup, lifted
from adiv_monitor.audit.training.train import train
from adiv_monitor.diagnosis import diagnose
from adiv_monitor.diagnosis.finding import Finding
from adiv_monitor.diagnosis.record import Fact, Probed, Record

STEPS = 16
QUESTIONS = {*ASKS, *LOOKS}
SETS = ("padded-lines-adamw",)  # of words, whose order is ignored on purpose
TOLD = QUESTIONS - {"row-spread"}  # which readings tell, too
# Planted in test_wiring_probes.py and test_model_wiring.py, with healthy relatives of each.
IN_OTHER_TESTS = {
    *("attention-axis", "zero-gradient"),
    *("outputs-constant", "zero-slope"),
    *("collapsed", "state-carried", "batch-part-unread", "term-without-graph", "terms-opposed"),
    *("dropout-in-eval", "running-statistics", "logits-as-probabilities", "loss-reversed"),
    "targets-misplaced",
    *("target-attached", "decay-fights"),
    *("zero-factor", "row-spread"),
    *("outputs-in-vain", "weighs-itself", "seed-again", "added-to-itself"),
    *("outputs-tied", "dropout-on-outputs"),
}
ASKED_OF = [case for case in (*SET_BY, *HELD_OUT) if case.expected[0] in TOLD]


def looked_at(bed: Case | Healthy) -> Record:
    """A short run, of which nothing is tried."""
    return observe(bed.build(0).setup(STEPS, 0), every_n_steps=8)


def found(bed: Case | Healthy) -> dict[str, Finding]:
    return {finding.name: finding for finding in diagnose(looked_at(bed))}


@pytest.mark.slow
@pytest.mark.parametrize("case", ASKED_OF, ids=lambda case: case.name)
def test_a_planted_bug_is_named(case: Case) -> None:
    assert case.expected[0] in found(case)


@pytest.mark.slow(one_in=32)
@pytest.mark.parametrize("twin", TWINS.values(), ids=lambda twin: twin.name)
def test_no_probe_finds_a_fault_in_a_fixed_twin(twin: Healthy) -> None:
    record = looked_at(twin)
    said = found(twin).keys() & TOLD
    assert said == ({"order-ignored"} if twin.name in SETS else set())
    assert set(record.probed) == QUESTIONS


def test_every_probe_has_a_planted_bug_on_each_side() -> None:
    for half in (SET_BY, HELD_OUT):
        found = {case.expected[0] for case in half}
        assert found >= QUESTIONS - {"left-in-eval", "behind-reference"} - IN_OTHER_TESTS
    assert {case.twin.name for case in REPORTED.values()} == TWINS.keys()


def test_probes_change_nothing_and_draw_nothing() -> None:
    model = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Dropout(0.9), nn.Linear(16, 3))
    before = {name: x.clone() for name, x in model.state_dict().items()}
    of = setup(model=model)
    chance = torch.get_rng_state()
    told = asked(of, of.fork())
    assert torch.equal(chance, torch.get_rng_state())
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert told["dropout-too-high"].facts
    assert asked(of, of.fork()) == told


def test_a_probe_that_fails_can_not_tell() -> None:
    def failing(model: nn.Module, batch: object) -> Tensor:
        raise RuntimeError("no such batch")

    of = setup(loss=failing)
    told = asked(of, of.fork())
    assert told["dropout-too-high"].untold == "RuntimeError: no such batch"
    found = {name for name, probed in told.items() if probed.facts}
    assert found <= {"unshuffled"}, "which looks at the batches alone"


# Samples and axes


class Net(nn.Module):
    """Two layers and a function that uses them."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.first, self.head = nn.Linear(12, 8), nn.Linear(8, 3)
        self.listed, self.moved = [nn.Linear(8, 8)], [nn.Parameter(torch.zeros(8)) * 1]
        self.graph = nn.Buffer(torch.eye(32) + torch.eye(32).roll(1, 0))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def asked_one(name: str, of: Setup) -> Probed:
    return answer(name, of, of.fork())


def facts_of(name: str, function: Callable[[Any, Tensor], Tensor]) -> list[Fact]:
    return [*asked_one(name, setup(model=Net(function))).facts]


def plain(net: Any, x: Tensor) -> Tensor:
    return net.head(net.first(x).relu())


def shifted(net: Any, x: Tensor) -> Tensor:
    """Scores of relative positions are shifted by a reshape, as XLNet's are."""
    scores = x.reshape(-1, 3, 4)
    padded = functional.pad(scores, (0, 1)).reshape(-1, 5, 3)[:, :4]
    moved = scores.reshape(-1, 4, 3)[:, 1:].reshape(-1, 3, 3)
    return net.head(net.first(x)) + padded.sum(1) + moved.sum(1)


@pytest.mark.parametrize(
    ("shapes", "scrambles"),
    [(((-1, 4, 3), (-1, 3, 4)), True), (((-1, 6, 2), (-1, 2, 2, 3)), True), (((12, -1),), True),
     (((-1, 4, 3), (-1, 4, 1, 3)), False), (((-1, 4, 3), (128, 3)), False),
     (((-1, 4, 3), (-1, 2, 2, 3)), False)],
)  # fmt: skip
def test_a_reshape_that_scrambles_is_told_from_one_that_splits_or_joins_axes(
    shapes: tuple[tuple[int, ...], ...], scrambles: bool
) -> None:
    def reshaped(net: Any, x: Tensor) -> Tensor:
        z = x
        for shape in shapes:
            z = z.reshape(shape)
        return plain(net, z.reshape(x.shape))

    assert bool(facts_of("reshape-scrambles", reshaped)) is scrambles


class Passed(torch.autograd.Function):
    """Calls functions that are not seen, as a compiled extension does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2 * grads[0]


def straight_through(z: Tensor) -> Tensor:
    return z + (z.round() - z).detach()


def under_no_grad(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        z = net.first(x).relu()
    return net.head(z)


@pytest.mark.parametrize(
    ("function", "is_cut"),
    [(lambda net, x: net.head(net.first(x).detach()), True), (under_no_grad, True),
     (lambda net, x: net.head(net.first(x).data.relu()), True),
     (lambda net, x: net.head(straight_through(net.first(x))), False),
     (lambda net, x: plain(net, x) - plain(net, x.flip(1)).detach(), False),
     (lambda net, x: net.head(Passed.apply(net.first(x))), False), (plain, False)],
    ids=["detach", "no_grad", "data", "straight-through", "target", "custom", "plain"],
)  # fmt: skip
def test_a_cut_in_front_of_parameters_is_told_from_those_on_purpose(
    function: Any, is_cut: bool
) -> None:
    found = facts_of("gradient-cut", function)
    assert bool(found) is is_cut
    assert all(fact.numbers["cosine"] < 0.99 for fact in found)


def test_a_cut_between_two_players_is_left_alone_and_others_are_not() -> None:
    for removed, names in ((-1.0, []), (-0.1, ["gradient-cut"])):
        fact = Fact("detach", {"cosine": 0.0, "removed": removed})
        of = made_record(probed={"gradient-cut": Probed((fact,))}, descent_share=-1.0)
        assert [f.name for f in diagnose(of)] == names


def noisy(net: Any, x: Tensor) -> Tensor:
    return plain(net, x) + torch.randn(len(x), 3)


def at_indices(net: Any, x: Tensor) -> Tensor:
    z = plain(net, x)
    return z + torch.zeros_like(z).index_add(0, torch.arange(len(z)).roll(1), z)


def among_samples(net: Any, x: Tensor) -> Tensor:
    z = plain(net, x)
    return z + (z @ z.T).softmax(1) @ z


@pytest.mark.parametrize(
    ("function", "place", "untold"),
    [(lambda net, x: plain(net, x).softmax(0), "softmax", ""), (among_samples, "matmul", ""),
     (lambda net, x: plain(net, x) + torch.arange(len(x))[:, None], "", ""),
     (plain, None, ""), (noisy, None, "random numbers"),
     (at_indices, None, "graph"), (lambda net, x: net.graph @ plain(net, x), None, "graph")],
    ids=["softmax", "attention", "place", "plain", "noise", "index_add", "graph"],
)  # fmt: skip
def test_samples_that_mix_are_told_from_nodes_and_from_noise(
    function: Any, place: str | None, untold: str
) -> None:
    told = asked_one("samples-mixed", setup(model=Net(function)))
    assert bool(told.facts) is (place is not None) and untold in told.untold
    assert all(fact.place.startswith(place or "") for fact in told.facts)


@pytest.mark.parametrize("positions", [True, False])
def test_samples_may_lie_along_the_second_axis(positions: bool) -> None:
    """Learnt positions tell that the second axis is that of time, so attention is over samples."""

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.places = nn.Parameter(torch.randn(1, 5, 8))
            self.attends = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)

        def forward(self, x: Tensor) -> Tensor:
            return self.attends(x + self.places if positions else x)

    def by_place(model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    made = ((torch.randn(7, 5, 8), torch.randint(3, (7, 5))),)
    told = asked_one("samples-mixed", setup(model=Attends(), loss=by_place, batches=made))
    assert bool(told.facts) is positions and ("second axis" in told.untold) is not positions


# Hidden parameters, and activation functions


def in_a_list(net: Any, x: Tensor) -> Tensor:
    return net.head(net.listed[0](net.first(x)))


@pytest.mark.parametrize(
    ("function", "place"),
    [(in_a_list, "listed[0].weight"), (plain, ""),
     (lambda net, x: net.head(nn.Linear(8, 8)(net.first(x))), "linear (test_probes.py:"),
     (lambda net, x: net.head(net.first(x) @ nn.Parameter(torch.randn(8, 8))), "matmul"),
     (lambda net, x: net.head(net.first(x) + net.moved[0]), "moved")],
)  # fmt: skip
def test_parameters_that_are_not_registered_are_named(function: Any, place: str) -> None:
    found = facts_of("hidden-parameters", function)
    assert bool(found) is bool(place)
    assert not found or found[0].place.startswith(place)


def unassigned(net: Any, x: Tensor) -> Tensor:
    z = net.first(x)
    z.relu()
    return net.head(z)


def test_a_lost_activation_is_told_from_one_that_is_used() -> None:
    lost, affine = facts_of("no-activation", unassigned)
    assert lost.words == {"by": "lost"} and lost.place.startswith("relu (test_probes.py")
    assert affine.words == {"by": "affine"} and affine.numbers == {"layers": 2.0}
    in_place = Net(lambda net, x: net.head(net.first(x).relu_()))
    custom = Net(lambda net, x: net.head(Passed.apply(net.first(x).relu())))
    for healthy in (in_place, custom, nn.Linear(12, 3)):
        assert asked_one("no-activation", setup(model=healthy)) == Probed()


# Sequences


def next_token(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    tokens = batch[0]
    return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def same_token(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[0].flatten())


class OfTokens(nn.Module):
    """A recurrent network of tokens, in one direction or both."""

    def __init__(self, both_ways: bool) -> None:
        super().__init__()
        width = 4 if both_ways else 8
        self.words = nn.Embedding(9, 8)
        self.gru = nn.GRU(8, width, batch_first=True, bidirectional=both_ways)
        self.head = nn.Linear(8, 9)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        z = self.head(self.gru(self.words(tokens))[0])
        return z if labels is None else (z, functional.cross_entropy(z.transpose(1, 2), labels))


def own_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    tokens = batch[0]
    result: Tensor = model(tokens[:, :-1], tokens[:, 1:])[1]
    return result


def text(model: nn.Module, of_batch: Any) -> Setup:
    drawn = torch.Generator().manual_seed(0)
    made = [(torch.randint(1, 9, (8, 11), generator=drawn),) for _ in range(4)]
    return setup(model=model, loss=of_batch, batches=made)


@pytest.mark.parametrize(
    ("both_ways", "of_batch", "name"),
    [(True, next_token, "future-leak"), (False, next_token, ""), (False, same_token,
     "target-is-input"), (True, same_token, ""), (True, own_loss, "future-leak"),
     (False, own_loss, "")],
)  # fmt: skip
def test_targets_that_the_loss_makes_of_the_tokens_are_seen(
    both_ways: bool, of_batch: Any, name: str
) -> None:
    of = text(OfTokens(both_ways), of_batch)
    names = ("future-leak", "target-is-input")
    assert [x for x in names if asked_one(x, of).facts] == ([name] if name else [])


class Shifting(OfTokens):
    """Sees only the tokens before each place, as models do that shift their inputs themselves."""

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        return super().forward(functional.pad(tokens[:, :-1], (1, 0)), labels)


@pytest.mark.parametrize(
    ("model", "inputs", "first", "places"),
    [(OfTokens, slice(1, 11), 0, -1.0), (OfTokens, slice(0, 9), 2, 2.0),
     (OfTokens, slice(0, 8), 3, None), (Shifting, slice(0, 10), 0, None),
     (Shifting, slice(0, 10), 1, 2.0)],
)  # fmt: skip
def test_targets_are_the_tokens_after_the_last_that_an_output_sees(
    model: type[OfTokens], inputs: slice, first: int, places: float | None
) -> None:
    def of_places(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        z = model(batch[0][:, inputs])
        y = batch[0][:, first : first + z.shape[1]]
        return functional.cross_entropy(z[:, : y.shape[1]].flatten(0, 1), y.flatten())

    told = asked_one("target-is-input", text(model(False), of_places))
    found = [fact.numbers["places"] for fact in told.facts]
    assert found == ([] if places is None else [places])


@pytest.mark.parametrize(
    ("change", "index", "of"),
    [(lambda x, y: (0 * x, y), -100, "inputs"), (lambda x, y: (x, 0 * y), -100, "labels"),
     (lambda x, y: (x, y.clamp(max=1)), -100, ""), (lambda x, y: (x, y.clamp(max=1)), 0, "rest"),
     (lambda x, y: (x, 0 * y), 0, "ignored"), (lambda x, y: (x, y), 0, "")],
)  # fmt: skip
def test_data_without_differences_are_named(change: Any, index: int, of: str) -> None:
    def ignoring(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1], ignore_index=index)

    changed = [change(x, y) for x, y in batches()]
    facts = asked_one("constant-data", setup(batches=changed, loss=ignoring)).facts
    assert [fact.words["of"] for fact in facts] == ([of] if of else [])


@pytest.mark.parametrize("at_boundary", [False, True])
def test_values_that_are_all_the_same_are_named_but_at_a_boundary(at_boundary: bool) -> None:
    def of_values(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        x, other, y = batch
        values = model(x + other)[:, 0]
        loss = functional.mse_loss(values, y)
        return loss + functional.mse_loss(values, x[:, 0]) if at_boundary else loss

    changed = [(x, x.flip(0), torch.zeros(len(x))) for x, _ in batches()]
    facts = asked_one("constant-data", setup(batches=changed, loss=of_values)).facts
    assert [fact.words["of"] for fact in facts] == ([] if at_boundary else ["labels"])


def test_labels_that_no_loss_uses_may_all_be_the_same() -> None:
    def copying(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (model(batch[0]) - batch[0][:, :3]).square().mean()

    changed = [(x, 0 * y) for x, y in batches()]
    assert asked_one("constant-data", setup(batches=changed, loss=copying)) == Probed()


# Inputs


def test_a_reshape_that_lets_places_see_the_next_stands_before_the_leak() -> None:
    """The leak lowers the loss, so that no run suffers and no trial of the fix pays."""
    moved = Fact("view", {}, {"of": "(8, 6, 16)", "to": "(8, 4, 6, 4)"})
    probed = {"reshape-scrambles": moved, "future-leak": Fact("", {"change": 0.3})}
    found = diagnose(made_record(probed={name: Probed((fact,)) for name, fact in probed.items()}))
    assert [(f.name, f.strength) for f in found] == [
        ("reshape-scrambles", "act"),
        ("future-leak", "watch"),
    ]


class Attends(nn.Module):
    """Attention over the places of a line of words, which may have positions."""

    def __init__(self, causal: bool = False, positions: float | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.causal, self.head = nn.Embedding(9, 8), causal, nn.Linear(8, 3)
        self.places = None if positions is None else nn.Parameter(torch.full((7, 8), positions))

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + (0.0 if self.places is None else self.places)
        mixed = functional.scaled_dot_product_attention(x, x, x, is_causal=self.causal)
        return self.head((x + mixed).relu())


def test_order_that_is_ignored_is_told_from_places_by_themselves_and_from_masks() -> None:
    """Learnt positions that begin at zero are not missing."""
    lines = torch.randint(9, (16, 7), generator=torch.Generator().manual_seed(0))

    def of_lines(model: nn.Module, lines: Tensor = lines) -> Setup:
        def by_places(model: nn.Module, batch: Any) -> Tensor:
            return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten() % 3)

        return setup(model=model, loss=by_places, batches=((lines, lines.clone()),))

    told = asked_one("order-ignored", of_lines(Attends()))
    assert told.facts[0].numbers == {"places": 7}
    alone = nn.Sequential(nn.Embedding(9, 8), nn.ReLU(), nn.Linear(8, 3))
    for model in (Attends(causal=True), alone):
        assert not asked_one("order-ignored", of_lines(model)).facts
    alike = asked_one("order-ignored", of_lines(Attends(), torch.ones_like(lines)))
    assert not alike.facts and alike.untold == "all positions are equal"
    of = of_lines(Attends(positions=0.0))
    trained = of.fork()
    assert answer("order-ignored", of, trained).facts, "it is not trained yet"
    with torch.no_grad():
        trained.model.places.add_(torch.randn(7, 8))  # type: ignore[operator, union-attr]
    assert not answer("order-ignored", of, trained).facts


def of_features(features: slice) -> Any:
    def forward(net: Any, x: Tensor) -> Tensor:
        kept = torch.zeros_like(x)
        kept[:, features] = x[:, features]
        return plain(net, kept)

    return Net(forward)


def test_features_that_are_ignored_are_named_and_constant_ones_are_not() -> None:
    told = asked_one("input-partly-ignored", setup(model=of_features(slice(0, 7))))
    (fact,) = told.facts
    assert (
        fact.place == "features 7, 8, 9 and 2 more of the input" and fact.numbers["share"] == 5 / 12
    )
    padded = tuple((x * (torch.arange(12) < 7), y) for x, y in batches())
    for of in (
        setup(model=of_features(slice(0, 7)), batches=padded),
        setup(model=of_features(slice(0, 0))),  # that is another finding
        setup(),
    ):
        assert not asked_one("input-partly-ignored", of).facts


# Batches


def test_a_batch_that_is_given_again_is_one_and_may_be_meant() -> None:
    once = batches(1)[0]
    of = setup(batches=taken([once] * 8, 8, torch.device("cpu")))
    assert len({id(batch) for batch in of.batches}) == 1
    assert asked_one("same-batch", of).facts[0].words == {"of": "one"}  # to be watched
    anew = [tuple(x.clone() for x in once) for _ in range(8)]
    of = setup(batches=taken(anew, 8, torch.device("cpu")))
    assert asked_one("same-batch", of).facts[0].numbers == {"different": 1, "batches": 8}


# Learning rates


def scheduled(factor: Any) -> SGD:
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.scheduler = LambdaLR(optimizer, factor)  # type: ignore[attr-defined]
    return optimizer


def test_a_warm_up_from_zero_is_told_from_a_schedule_that_stays_there() -> None:
    rises, stays = scheduled(lambda step: step / 10), scheduled(lambda step: step // 1000)
    assert lifted(rises, 20) == {0: 0.1} and lifted(stays, 20) == {}
    assert rises.param_groups[0]["lr"] == 0 and rises.scheduler.last_epoch == 0  # type: ignore[attr-defined]


def sequential(optimizer: SGD) -> LRScheduler:
    parts: list[LRScheduler] = [LinearLR(optimizer, 0.01, 1, 50), CosineAnnealingLR(optimizer, 100)]
    return SequentialLR(optimizer, parts, [50])


@pytest.mark.parametrize(
    ("made", "peak"),
    [
        (lambda o: LinearLR(o, 1e-3, 1, 500), 0.1),
        (lambda o: LambdaLR(o, lambda step: min((step + 1) ** -0.5, (step + 1) / 8e3)), 0.1 / 20),
        (lambda o: LambdaLR(o, lambda step: (step + 1) / 1e5), 0.1),  # its end is not seen
        (lambda o: OneCycleLR(o, max_lr=2.5, total_steps=200), 2.5),
        (sequential, 0.1),
        (lambda o: CosineAnnealingLR(o, 40), None),  # torch's rises again after its end
        (lambda o: ExponentialLR(o, 1.2), None),  # a search for the largest rate, not a warm-up
        (ReduceLROnPlateau, None),
    ],
)
def test_what_a_scheduler_raises_is_trained_at_the_highest_rate_of_the_warm_up(
    made: Callable[[SGD], object], peak: float | None
) -> None:
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    kept = made(optimizer)
    before = optimizer.param_groups[0]["lr"]
    of = setup(model=model, optimizer=optimizer)
    (group,) = of.fork().optimizer.param_groups
    assert group["lr"] == pytest.approx(before if peak is None else peak, rel=1e-2)
    assert optimizer.param_groups[0]["lr"] == before
    del kept


@pytest.mark.parametrize("dropped", [True, False])
def test_a_factory_whose_warm_up_begins_at_zero_trains_at_its_peak(dropped: bool) -> None:
    def made(model: nn.Module) -> SGD:
        optimizer = SGD(model.parameters(), lr=0.1)
        scheduler = LambdaLR(optimizer, lambda step: min(1.0, step / 10))
        if not dropped:
            optimizer.kept = scheduler  # type: ignore[attr-defined]
        return optimizer

    of = setup(optimizer=made)
    assert of.fork().optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    assert not asked_one("rate-zero", of).facts


# The loss and the outputs


def negated(model: nn.Module, batch: Any) -> Tensor:
    return -loss(model, batch)


def likelihood(model: nn.Module, batch: Any) -> Tensor:
    """Of a normal distribution whose variance is learnt: it goes below zero, and has a bound."""
    x, y = batch
    mean, log_variance = model(x)[:, 0] / 10, model(x)[:, 1]
    wanted = 0.01 * (y - 1)
    return (log_variance + (wanted - mean).square() / log_variance.exp()).mean()


def cosine(model: nn.Module, batch: Any) -> Tensor:
    return -torch.cosine_similarity(model(batch[0]), functional.one_hot(batch[1], 3)).mean()


def unbounded(of: Any, given: Any = None) -> tuple[Fact, ...]:
    bed = setup(loss=of, batches=given or batches(), optimizer=adam)
    trained = bed.fork()
    train(trained)
    return answer("unbounded-loss", bed, trained).facts


@pytest.mark.parametrize("bounded", [likelihood, cosine, loss])
def test_a_loss_without_a_bound_is_told_from_one_with_a_bound(bounded: Any) -> None:
    assert unbounded(negated)[0].numbers["times"] == 64
    assert unbounded(bounded) == ()


def test_samples_with_negative_weights_have_no_lower_bound_by_construction() -> None:
    def policy(model: nn.Module, batch: Any) -> Tensor:
        x, action, advantage = batch
        chosen = model(x).log_softmax(1).gather(1, action[:, None])[:, 0]
        return -(chosen * advantage).mean()

    def error(model: nn.Module, batch: Any) -> Tensor:  # no weight: it is not linear so far
        return -(100 + model(batch[0])[:, 0] - batch[2]).abs().mean()

    with_rewards = tuple((x, y, -1.0 - y) for x, y in batches())
    for of, negative in ((policy, 32), (error, 0)):
        assert unbounded(of, with_rewards)[0].numbers["negative"] == negative, of


# The data


def trained_on(of: Setup) -> Probed:
    fork = of.fork()
    train(fork)
    return answer("behind-reference", of, fork)


class Faint(nn.Module):
    """Outputs that hardly depend on the inputs, and hardly learn to."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(1e-4 * x)


def apart(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Labels of other samples."""
    drawn = torch.Generator().manual_seed(3)
    y = torch.cat([labels for _, labels in given])
    y = y[torch.randperm(len(y), generator=drawn)].split(len(given[0][1]))
    return tuple((x, labels) for (x, _), labels in zip(given, y, strict=True))


def judged(of: Setup) -> set[str]:
    found = diagnose(made_record(probed={"behind-reference": trained_on(of)}))
    return {finding.name for finding in found}


def test_a_small_network_tells_a_fault_of_the_model_from_one_of_the_data() -> None:
    healthy = setup(batches=batches(24))
    numbers = trained_on(healthy).facts[0].numbers
    assert min(numbers["reference"], numbers["model"]) > 0.8
    assert judged(replace(healthy, model=Faint())) >= {"behind-reference"}
    unrelated = apart(healthy.batches)
    assert "labels-unrelated" in judged(replace(healthy, batches=unrelated))
    epochs = tuple((x.clone(), y) for x, y in 2 * unrelated)
    assert "labels-unrelated" in judged(replace(healthy, batches=epochs, steps=48))


@pytest.mark.parametrize("missing", [0.0, 0.1])
def test_labels_that_are_rare_or_beside_missing_values_belong_to_their_inputs(
    missing: float,
) -> None:
    """A constant prediction is right in nine of ten, and numbers for missing values are far off."""
    drawn = torch.Generator().manual_seed(0)
    x = torch.randn(24, 64, 12, generator=drawn)
    y = (x[..., 0] > 1.28).long() if not missing else (x[..., 0] > 0).long()
    x = x.where(torch.rand(x.shape, generator=drawn) >= missing, -999.0)
    of = setup(batches=tuple(zip(x, y, strict=True)), model=Faint())
    assert "labels-unrelated" not in judged(of)
    assert "labels-unrelated" in judged(replace(of, batches=apart(of.batches)))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.03)


# Calls


def scores_in(x: Tensor, name: str = "nll_loss") -> str:
    """What the probe says of a call of a loss of log-probabilities."""
    call = Call(0, name, None, (x, torch.zeros(len(x)).long()), {}, None, functional.nll_loss)
    return given_to(call)


def test_a_loss_of_log_probabilities_is_told_what_it_is_given() -> None:
    logits = torch.randn(8, 5, generator=torch.Generator().manual_seed(0))
    assert scores_in(logits) == scores_in(logits / 10) == "logits"
    assert scores_in(logits.softmax(1)) == "probabilities"
    assert scores_in(logits.log_softmax(1)) == scores_in(logits.half().log_softmax(1)) == ""
    assert scores_in(logits.log_softmax(0)) == ""  # this is softmax-over-samples
    masked = logits.masked_fill(torch.arange(5) == 2, -math.inf).log_softmax(1)
    assert scores_in(masked) == ""


def test_log_probabilities_over_another_axis_than_the_classes_are_told() -> None:
    logits = torch.randn(8, 6, 5, generator=torch.Generator().manual_seed(0))
    for name, classes in (("nll_loss", 1), ("ctc_loss", 2)):
        told = [scores_in(logits.log_softmax(axis), name) for axis in range(3)]
        assert told == ["" if axis == classes else "another axis" for axis in range(3)]
    assert all(scores_in(logits.log_softmax(axis), "kl_div") == "" for axis in range(3))
