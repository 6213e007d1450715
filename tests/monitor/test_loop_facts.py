"""What the training loop did to a step: the model's mode, its passes, and its batches.

No reading tells these, so a report has them as they are.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from computes import Computes
from setups import trained
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from adiv_monitor import Monitor, StepReport
from adiv_monitor.capture.batch import given_of
from adiv_monitor.step.loss_log import LossLog


class Net(nn.Module):
    """A model with dropout, attention and a norm with running statistics, and with others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.free = nn.BatchNorm1d(8, track_running_stats=False)
        self.drop, self.keep = nn.Dropout(0.1), nn.Dropout(0.0)
        self.alpha = nn.AlphaDropout(0.2)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1)
        self.plain = nn.MultiheadAttention(8, 2)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.free(self.norm(self.first(x)))
        h = self.alpha(self.keep(self.drop(h)))
        h = h + self.attention(h, h, h, need_weights=False)[0]
        h = h + self.plain(h, h, h, need_weights=False)[0]
        return self.last(h)


FACTS = ("zeroed_passes", "loss_gradients", "evaluated", "batch", "next_batch")
FACTS += ("dropout", "rescaled", "batch_spread", "settings")
FACTS += ("new_state", "outputs", "labels", "loss_module", "loss_settings", "loss_shapes")
FACTS += ("target_moments", "loss_weights")
FACTS += ("norm_passes", "norm_momenta", "random_states")
FACTS += ("unused_losses", "loss_counts", "rate_falls")
RATES = [0.5, 0.6, 0.9]
TARGETS = torch.arange(6) % 3
CHANGED = ("norm", "drop", "alpha", "attention")


def batch(number: int) -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(number))


def loss_of(model: nn.Module, number: int = 0) -> Tensor:
    return functional.cross_entropy(model(batch(number)), TARGETS)


def stepping(
    loss: Callable[[int], Tensor], before: Callable[[int], object] = lambda number: None
) -> Callable[[torch.optim.Optimizer, int], None]:
    """Return what takes a step by the loss of its number."""

    def step(optimizer: torch.optim.Optimizer, number: int) -> None:
        before(number)
        optimizer.zero_grad()
        loss(number).backward()
        optimizer.step()

    return step


def reports_of(
    model: nn.Module,
    step: Callable[[torch.optim.Optimizer, int], None],
    steps: int = 4,
    **asked: Any,
) -> list[StepReport]:
    """Train with a monitor, and return its reports; check that the run is as without it."""
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    found = []
    for monitored in (False, True):
        model.load_state_dict(weights)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.zero_grad()
        torch.manual_seed(1)
        options = {"every_n_steps": 1, "on_error": "raise", **asked}
        monitor = Monitor(model, optimizer, **options)
        monitor.attach() if monitored else monitor.close()
        for number in range(steps):
            step(optimizer, number)
        monitor.close()
        found.append([value.clone() for value in model.state_dict().values()])
    assert all(map(torch.equal, *found))
    reports = list(monitor.reports)
    for report in reports:
        again = StepReport.from_dict(report.to_dict())
        assert all(getattr(again, name) == getattr(report, name) for name in FACTS)
    return reports


# --- the mode of the model ------------------------------------------------------------------------


@pytest.mark.slow(one_in=2)
@pytest.mark.parametrize("asked", [{}, {"layers_per_step": 2}])
@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: nn.DataParallel(model)])
def test_a_model_left_in_eval_mode(asked: dict[str, Any], wrap: Callable[..., nn.Module]) -> None:
    model = wrap(Net())
    step = stepping(lambda _: loss_of(model), lambda number: model.train(number < 2))
    found = [set(report.evaluated) for report in reports_of(model, step, **asked)]
    assert found == [set(), set(), set(CHANGED), set(CHANGED)]


def in_parts(model: Net) -> None:
    """Keep statistics frozen on purpose."""
    model.norm.eval()


def after_an_evaluation(model: Net) -> None:
    """Evaluate with gradients on."""
    model.eval()
    loss_of(model)
    model.train()


@pytest.mark.parametrize("look", [in_parts, after_an_evaluation])
def test_what_is_no_training_in_eval_mode(look: Callable[[Net], None]) -> None:
    model = Net()
    step = stepping(lambda _: loss_of(model), lambda _: look(model))
    assert [report.evaluated for report in reports_of(model, step)] == [()] * 4


# --- the backward passes --------------------------------------------------------------------------


def two_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def plain(model: nn.Module, criterion: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    criterion(model(batch(0)), TARGETS).backward()
    optimizer.step()


def accumulates(model: nn.Module, criterion: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for number in range(3):
        loss = criterion(model(batch(number)), TARGETS)
        loss /= 4
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def penalizes(model: nn.Module, criterion: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    loss = criterion(model(batch(2)), TARGETS)
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    (0.5 * loss + sum(gradient.square().sum() for gradient in gradients)).backward()
    optimizer.step()


def zeroes_each(model: nn.Module, criterion: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for number in range(8):
        optimizer.zero_grad()
        (criterion(model(batch(number)), TARGETS) / 8).backward()
    optimizer.step()


def perturbs(model: nn.Module, criterion: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """SAM."""
    optimizer.zero_grad()
    (2 * criterion(model(batch(0)), TARGETS)).backward()
    moves = [0.01 * p.grad for p in model.parameters() if p.grad is not None]
    with torch.no_grad():
        torch._foreach_add_(list(model.parameters()), moves)
    optimizer.zero_grad()
    criterion(model(batch(0)), TARGETS).backward()
    with torch.no_grad():
        torch._foreach_sub_(list(model.parameters()), moves)
    optimizer.step()


def clips_each_sample(
    model: nn.Module, criterion: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """DP-SGD by hand: the optimizer gets the sum of the samples' gradients, each clipped."""
    total = [torch.zeros_like(p) for p in model.parameters()]
    for x, target in zip(batch(0), TARGETS, strict=True):
        optimizer.zero_grad()
        criterion(model(x[None]), target[None]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for whole, p in zip(total, model.parameters(), strict=True):
            whole += p.grad
    for whole, p in zip(total, model.parameters(), strict=True):
        p.grad.copy_(whole / 6)
    optimizer.step()


def checkpoints(model: nn.Module, criterion: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Each module has a backward pass of its own, inside that of the loss."""
    for number in range(3):
        optimizer.zero_grad()
        h = batch(number).requires_grad_()
        for module in model:
            h = checkpoint(module, h, use_reentrant=True)
        criterion(h, TARGETS).backward()
    optimizer.step()


def attacks(model: nn.Module, criterion: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One pass for the gradient of the inputs, another for that of the weights."""
    x = batch(0).requires_grad_()
    criterion(model(x), TARGETS).backward()
    optimizer.zero_grad()
    criterion(model(x.detach() + 0.1 * x.grad.sign()), TARGETS).backward()
    optimizer.step()


LOOPS: dict[str, tuple[Any, tuple[tuple[float, ...], int]]] = {
    "one pass": (plain, ((1.0,), 0)),
    "accumulation": (accumulates, ((0.25,) * 3, 0)),
    "a gradient penalty": (penalizes, ((0.5,), 0)),
    "zeroed before each micro-batch": (zeroes_each, ((0.125,) * 8, 7)),
    "a first pass elsewhere": (perturbs, ((1.0,), 0)),
    "re-entrant checkpoints": (checkpoints, ((1.0,) * 3, 0)),  # their inputs are differentiated
    "adversarial inputs": (attacks, ((1.0,) * 2, 0)),
    "samples that are clipped one by one": (clips_each_sample, ((1.0,) * 6, 0)),
}


@pytest.mark.slow(one_in=7)
@pytest.mark.parametrize("asked", [{}, {"layers_per_step": 1}])
@pytest.mark.parametrize("name", LOOPS)
def test_the_passes_of_a_step(name: str, asked: dict[str, Any]) -> None:
    loop, expected = LOOPS[name]
    model, criterion = two_layers(), nn.CrossEntropyLoss()
    step = lambda optimizer, _: loop(model, criterion, optimizer)  # noqa: E731
    reports = reports_of(model, step, 3, loss=criterion, **asked)
    assert [(report.loss_gradients, report.zeroed_passes) for report in reports] == [expected] * 3


@pytest.mark.parametrize("first", ["critic", "generator"])
def test_passes_of_another_networks_step_are_none_of_this_one(first: str) -> None:
    """The critic's gradients of the generator's pass are zeroed on purpose."""
    critic, generator = two_layers(), nn.Linear(3, 4)
    criterion, noise = nn.CrossEntropyLoss(), torch.randn(6, 3)
    other = torch.optim.SGD(generator.parameters(), lr=0.0)

    def of_generator(optimizer: torch.optim.Optimizer) -> None:
        other.zero_grad()
        criterion(critic(generator(noise)), TARGETS).backward()
        other.step()

    def of_critic(optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        (0.5 * criterion(critic(batch(0)), TARGETS)).backward()
        (0.5 * criterion(critic(generator(noise).detach()), TARGETS)).backward()
        optimizer.step()

    def step(optimizer: torch.optim.Optimizer, number: int) -> None:
        for part in (of_critic, of_generator) if first == "critic" else (of_generator, of_critic):
            part(optimizer)

    reports = reports_of(critic, step, 3, loss=criterion)
    told = [(report.loss_gradients, report.zeroed_passes) for report in reports]
    assert told == [((0.5, 0.5), 0)] * 3


# --- the batches ----------------------------------------------------------------------------------


def embedded() -> nn.Module:
    """A model whose inputs are integers."""
    parts = {"embed": nn.Embedding(5, 4, max_norm=1.0), "last": nn.Linear(4, 3)}
    return Computes(lambda m, x: m.last(m.embed(x).mean(1)), **parts)


def tokens(number: int) -> Tensor:
    """Permutations of the same numbers."""
    return torch.randperm(30, generator=torch.Generator().manual_seed(number)).view(6, 5) % 5


@pytest.mark.slow(one_in=9)
@pytest.mark.parametrize(
    ("model", "draw"),
    [(two_layers, batch), (embedded, tokens), (Net, batch)],
    ids=["reals", "integers", "norms"],
)
@pytest.mark.parametrize("asked", [{}, {"layers_per_step": 1}, {"realised": True}])
def test_a_batch_that_comes_again(
    model: Callable[[], nn.Module], draw: Callable[[int], Tensor], asked: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    made = model()

    def step(optimizer: torch.optim.Optimizer, number: int) -> None:
        optimizer.zero_grad()
        for part in (0, 10):
            functional.cross_entropy(made(draw((0, 0, 1, 1)[number] + part)), TARGETS).backward()
        optimizer.step()

    reports = reports_of(made, step, **asked)
    assert all(len(report.batch) == 1 for report in reports)
    assert [report.next_batch == report.batch for report in reports] == [True, False, True, False]
    assert [report.next_batch for report in reports[:-1]] == [r.batch for r in reports[1:]]
    assert reports[-1].next_batch == ()  # there was none


@pytest.mark.parametrize("gradients", [False, True])
def test_an_evaluation_is_not_the_next_batch(gradients: bool) -> None:
    model = two_layers()

    def step(optimizer: torch.optim.Optimizer, number: int) -> None:
        plain(model, nn.CrossEntropyLoss(), optimizer)
        model.eval()
        with torch.set_grad_enabled(gradients):
            model(batch(0))
        model.train()

    reports = reports_of(model, step, 3)
    assert [len(report.batch) for report in reports] == [1] * 3
    batches = [report.batch for report in reports]
    assert [report.next_batch for report in reports] == [*batches[1:], ()]


# --- settings -------------------------------------------------------------------------------------


def test_dropout_and_factors_are_those_of_the_step() -> None:
    model, rates = Net(), iter(RATES)

    def loss(model: Net) -> Tensor:
        model.drop.p = next(rates)
        return loss_of(model)

    def rescale(number: int) -> None:
        model.last.weight.grad *= 5  # type: ignore[operator]

    reports = trained(model, loss, len(RATES), between=rescale)
    assert [report.dropout for report in reports] == RATES
    assert [report.rescaled for report in reports] == [("last",)] * len(RATES)


OF_CLASSES, OF_EACH = (nn.CrossEntropyLoss(), TARGETS), (nn.BCEWithLogitsLoss(), torch.ones(6, 3))


@pytest.mark.parametrize(
    ("last", "criterion", "targets", "outputs"),
    [
        (nn.Softmax(1), *OF_CLASSES, "probabilities"),
        (nn.Identity(), *OF_CLASSES, ""),
        (nn.Sigmoid(), *OF_CLASSES, ""),
        (nn.ReLU(), *OF_CLASSES, "rectified"),
        (nn.Threshold(1e9, 0.0), *OF_CLASSES, ""),  # all of them are 0
        (nn.Softmax(0), *OF_CLASSES, "over samples"),
        (nn.LogSoftmax(0), nn.NLLLoss(), TARGETS, "over samples"),
        (nn.LogSoftmax(1), nn.NLLLoss(), TARGETS, ""),
        (nn.Sigmoid(), *OF_EACH, "probabilities"),
        (nn.Identity(), *OF_EACH, ""),
    ],
)
def test_what_the_loss_gets(
    last: nn.Module, criterion: nn.Module, targets: Tensor, outputs: str
) -> None:
    model = nn.Sequential(*two_layers(), last)
    step = stepping(lambda number: criterion(model(batch(number)), targets))
    report, *_ = reports_of(model, step, 1, loss=criterion)
    assert report.loss_module == type(criterion).__name__
    assert report.loss_shapes == ((6, 3), tuple(targets.shape))
    assert (report.outputs, sum(report.labels)) == (outputs, targets.numel())


RARE, LOGITS = torch.eye(6)[:, :1], nn.BCEWithLogitsLoss


@pytest.mark.parametrize(
    ("criterion", "targets", "told"),  # labels, settings, weights
    [
        (LOGITS(), RARE, ((5, 1), (), ())),
        (LOGITS(pos_weight=torch.tensor(3.0)), RARE, ((5, 1), ("pos_weight",), (1.0, 3.0))),
        (nn.BCELoss(torch.ones(6, 1)), RARE, ((5, 1), ("weight",), ())),
        (nn.MSELoss(), torch.arange(6.0)[:, None] ** 2, ((), (), ())),
        (nn.MSELoss(reduction="sum"), torch.arange(18.0).view(6, 3), ((), ("reduction",), ())),
        (nn.NLLLoss(torch.arange(3.0)), TARGETS, ((2, 2, 2), ("weight",), (0.0, 1.0, 2.0))),
        (nn.CrossEntropyLoss(ignore_index=2), TARGETS, ((2, 2, 2), ("ignore_index",), ())),
    ],
)
def test_what_the_targets_are_like(criterion: nn.Module, targets: Tensor, told: object) -> None:
    model = nn.Sequential(*two_layers(), nn.Linear(3, 3 if targets.ndim < 2 else targets.shape[1]))
    step = stepping(lambda number: criterion(model(batch(number)).sigmoid(), targets))
    report, *_ = reports_of(model, step, 1, loss=criterion)
    assert (report.labels, report.loss_settings, report.loss_weights) == told
    moments = (targets.var(correction=0).item(), targets.mean().item()) if targets.ndim > 1 else ()
    assert report.target_moments == pytest.approx(moments)


def test_a_loss_of_further_terms_is_not_the_modules() -> None:
    model, criterion = nn.Sequential(*two_layers()), nn.CrossEntropyLoss()
    with Monitor(model, None, loss=criterion, every_n_steps=1) as monitor:
        loss = criterion(model(batch(0)), TARGETS)
        monitor.log_loss(loss + 0.1)
        loss.backward()
        monitor.end_step()
    assert monitor.latest.loss_shapes and not monitor.latest.loss_module


@pytest.mark.parametrize("shape", [(0,), (0, 3), (), (4, 3, 2), (4, 101)])
def test_what_no_kinds_are_looked_for_in(shape: tuple[int, ...]) -> None:
    assert "outputs" not in given_of((torch.rand(shape), torch.rand(shape)))


def test_a_loss_that_is_said_and_seen_is_one() -> None:
    log = LossLog()
    for is_said in (True, False, True):
        log.add(7, 1.0, is_said=is_said)
    assert (log.of(7), log.of(8)) == (2, 0)


def test_labels_of_many_rows_are_those_of_all_places() -> None:
    (labels,) = given_of((torch.rand(10_000, 2), torch.arange(10_000) // 5_000))["labels"]
    assert labels.tolist() == [1667, 1667]  # every third
    (labels,) = given_of((torch.rand(3000, 2), torch.tensor([[0.0, 1.0]] * 3000)))["labels"]
    assert labels.tolist() == [3000, 3000]  # of all columns


def test_only_a_loss_of_torchs_own_has_a_name() -> None:
    class Squeezes(nn.MSELoss):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return super().forward(x.squeeze(1), y)

    model, criterion = nn.Sequential(nn.Linear(4, 1)), Squeezes()
    criterion.label_smoothing = torch.zeros(3)
    step = stepping(lambda number: criterion(model(batch(number)), TARGETS.float()))
    report, *_ = reports_of(model, step, 1, loss=criterion)
    assert (report.loss_module, report.loss_shapes) == ("", ((6, 1), (6,)))
    report, *_ = reports_of(model, step, 1)
    assert (report.loss_module, report.loss_shapes) == ("", ())


@pytest.mark.parametrize(("seeds", "drops", "repeats"), [(1, 1, 1), (0, 1, 0), (1, 0, 1)])
def test_random_numbers_that_repeat(seeds: int, drops: int, repeats: int) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5 * drops), nn.Linear(8, 3))
    seed = lambda _: seeds and torch.manual_seed(3)  # noqa: E731
    step = stepping(lambda number: loss_of(model, number), seed)
    states = [report.random_states for report in reports_of(model, step)]
    assert len({*states}) == (1 if repeats else 4)
    assert all(len({*of}) == 1 + drops for of in states)


def one_of_four(model: nn.Module, criterion: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for number in range(4):
        loss = criterion(model(batch(number)), TARGETS)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def two_terms(model: nn.Module, criterion: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    (criterion(model(batch(0)), TARGETS) + criterion(model(batch(1)), TARGETS)).backward()
    optimizer.step()
    with torch.no_grad():
        criterion(model(batch(2)), TARGETS)


@pytest.mark.slow(one_in=3)
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize(
    ("loop", "unused", "computed"),
    [(plain, 0, 1), (accumulates, 0, 3), (one_of_four, 3, 4), (two_terms, 0, 2)],
)
def test_losses_without_a_backward_pass(loop: Any, unused: int, computed: int, every: int) -> None:
    model, criterion = two_layers(), nn.CrossEntropyLoss()
    given = {"loss": criterion, "every_n_steps": every}
    reports = reports_of(model, lambda o, _: loop(model, criterion, o), 4, **given)
    assert {report.unused_losses for report in reports} == {unused}
    steps = [1] * 4 if every == 1 else [1, 3]
    assert [report.loss_counts for report in reports] == [{computed: n} for n in steps]


def test_losses_of_an_accumulation_that_an_epoch_cuts_off() -> None:
    """Three batches for a step, five in an epoch."""
    model, criterion = two_layers(), nn.CrossEntropyLoss()

    def step(optimizer: torch.optim.Optimizer, number: int) -> None:
        for micro in range(5 if number % 2 else 3):
            if number % 2 and micro == 2:
                optimizer.zero_grad()
            criterion(model(batch(micro)), TARGETS).backward()
        optimizer.step()
        optimizer.zero_grad()

    reports = reports_of(model, step, 7, loss=criterion, every_n_steps=3)
    assert [dict(sorted(r.loss_counts.items())) for r in reports] == [
        {3: 1},
        {3: 1, 5: 2},
        {3: 2, 5: 1},
    ]
    assert [r.zeroed_passes for r in reports] == [0, 2, 0]


SAW = [0.1, 0.2, 0.3, 0.4, 0.1, 0.2, 0.3, 0.4, 0.1, 0.1, 0.1]
RATES_OF_RUNS = {
    "a warm-up that begins again": (SAW, 2),
    "a warm-up and steps down": ([0.1, 0.2, 0.3, 0.4, 0.4, 0.1, 0.1, 0.01, 0.01, 0.001], 1),
    "a cosine that begins again": ([0.4, 0.3, 0.2, 0.1] * 3, 0),
    "triangles": ([0.1, 0.2, 0.3, 0.4, 0.3, 0.2] * 2, 0),
    "rates that alternate": ([0.1, 1.0] * 5, 0),
    "rates of numpy's": ([np.float64(rate) for rate in SAW], 2),
    "rates that are tensors": ([torch.tensor(rate) for rate in SAW], 0),
}


@pytest.mark.slow(one_in=3)
@pytest.mark.parametrize("name", RATES_OF_RUNS)
def test_rates_that_fall_back(name: str) -> None:
    values, falls = RATES_OF_RUNS[name]
    model = two_layers()

    def step(optimizer: torch.optim.Optimizer, number: int) -> None:
        optimizer.param_groups[0]["lr"] = values[number]
        optimizer.zero_grad()
        loss_of(model, number).backward()
        optimizer.step()

    reports = reports_of(model, step, len(values), every_n_steps=3)
    assert reports[-1].rate_falls == falls
    assert type(reports[-1].rate_falls) is int, "as JSON needs it"


@pytest.mark.parametrize("momentum", [None, 0.0, 0.1, 0.99, 0.001])
def test_passes_that_running_statistics_took_in(momentum: float | None) -> None:
    """Two micro-batches in each step, and after two steps a pass in training mode without one."""
    norm = nn.Identity() if momentum is None else nn.BatchNorm1d(3, momentum=momentum)
    model = nn.DataParallel(nn.Sequential(nn.Linear(4, 3), norm))

    def step(optimizer: torch.optim.Optimizer, number: int) -> None:
        optimizer.zero_grad()
        for micro in range(2):
            loss_of(model, micro).backward()
        optimizer.step()
        if number == 1:
            with torch.no_grad():
                model(batch(9))

    passes = [(report.norm_passes, report.norm_momenta) for report in reports_of(model, step)]
    odd = {} if momentum in (None, 0.0, 0.1) else {"1": momentum}
    assert passes == [(None if momentum is None else n, odd) for n in (2, 4, 7, 9)]


def test_the_spread_of_batches() -> None:
    model, criterion = two_layers(), nn.CrossEntropyLoss()
    x = batch(0)
    report, *_ = reports_of(model, lambda o, _: plain(model, criterion, o), 1, loss=criterion)
    samples = (x.double() * torch.arange(1, 5).double().sqrt()).sum(1)
    assert report.batch == pytest.approx((samples.sum().item(),), rel=1e-5)
    spread = samples.std(correction=0).item() * len(x) ** 0.5
    assert report.batch_spread == pytest.approx((spread,), rel=1e-5)


def test_what_the_optimizer_is_set_to_and_keeps() -> None:
    model = two_layers()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=0.1)

    def after(number: int) -> None:
        if number == 1:
            optimizer.state.clear()
        optimizer.param_groups[0]["betas"] = (0.9, 0.9)

    reports = trained(model, loss_of, 4, optimizer=optimizer, after=after)
    assert [report.new_state for report in reports] == [True, False, True, False]
    first, *_, last = (report.settings for report in reports)
    assert (first["beta1"], first["beta2"], last["beta2"]) == ((0.9,), (0.999,), (0.9,))
    assert last["weight_decay"] == (0.1,) and last["eps"] == (1e-8,) and "lr" not in last


@pytest.mark.parametrize("kind", [torch.optim.Adam, partial(torch.optim.SGD, momentum=0.9)])
def test_a_state_that_is_made_anew_between_measured_steps(kind: Any) -> None:
    model = two_layers()
    optimizer = kind(model.parameters(), lr=1e-3)

    def after(number: int) -> None:
        if number == 1:
            optimizer.state.clear()
        if number == 10:
            optimizer.load_state_dict(optimizer.state_dict())

    reports = trained(model, loss_of, 17, optimizer=optimizer, after=after, every_n_steps=4)
    new = {report.step: report.new_state for report in reports}
    assert new == {0: True, 4: True, 8: False, 12: True, 16: False}


def test_a_gradient_that_is_not_the_batches() -> None:
    model, other = two_layers(), two_layers()
    for p in other.parameters():
        p.data += torch.randn(p.shape, generator=torch.Generator().manual_seed(3))

    def step(optimizer: torch.optim.Optimizer, number: int) -> None:
        if number % 2 == 0:
            optimizer.zero_grad(set_to_none=number < 3)
            loss_of(model, number).backward()
        if number >= 4:
            other.zero_grad()
            loss_of(other, number).backward()
            for p, q in zip(model.parameters(), other.parameters(), strict=True):
                assert p.grad is not None and q.grad is not None
                p.grad.copy_(q.grad)
        optimizer.step()

    reports = reports_of(model, step, 6)
    shares = [max((x.foreign_share for x in r.layers.values()), default=0.0) for r in reports]
    assert shares[0] == 0 and shares[4] > 0.5
