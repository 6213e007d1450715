"""The gradient of the readings: accumulated, unscaled, clipped, and only that of a real step.

Every test compares with a plain run of the same step, or with values computed by hand.
"""

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import reference
import torch
from cases import loss_of
from computes import Computes
from setups import mlp, one_step, plain_step, same, trained
from torch import Tensor, nn
from torch.nn import functional

from adiv_monitor import LayerReading, Monitor

Course = Callable[[nn.Module, Tensor, Tensor], object]


def micro_batches(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Three of them, one of them smaller."""
    for part in (slice(0, 3), slice(3, 5), slice(5, 6)):
        loss = functional.cross_entropy(model(x[part]), y[part], reduction="sum")
        (loss / len(x)).backward()


def one_pass_zeroed(model: nn.Module, x: Tensor, y: Tensor) -> None:
    functional.cross_entropy(model(x[:3]), y[:3]).backward()
    model.zero_grad()
    loss_of(model, (x, y)).backward()


def two_passes_zeroed(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Two through one graph."""
    loss = loss_of(model, (x, y))
    loss.backward(retain_graph=True)
    loss.backward()
    model.zero_grad()
    loss_of(model, (x, y)).backward()


def zeroed_between(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Two passes through one graph, of which the second one counts."""
    loss = loss_of(model, (x, y))
    loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()


def attacked(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Adversarial training: a pass for the gradient of the input reaches no parameter."""
    probe = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(loss_of(model, (probe, y)), probe)
    loss_of(model, (x + 0 * slope, y)).backward()


def after_rollouts(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Evaluation with gradients on does not use up the rows."""
    for _ in range(20):
        model(x)
    loss_of(model, (x, y)).backward()


def looked_at_before(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """`autograd.grad` for the weights, with `.grad` zeroed in place, loses no rows."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(2):
        torch.autograd.grad(loss_of(model, (x, y)), list(model.parameters()))
    loss_of(model, (x, y)).backward()


def set_by_hand(model: nn.Module, x: Tensor, y: Tensor, factor: float = 1.0) -> None:
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(loss_of(model, (x, y)), parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient if factor == 1 else gradient * factor


COURSES: list[Course] = [micro_batches, one_pass_zeroed, two_passes_zeroed, zeroed_between]
COURSES += [attacked, looked_at_before, set_by_hand]


EVERY = [*((course, None) for course in COURSES), (after_rollouts, 6)]


@pytest.mark.parametrize(("course", "max_rows"), EVERY)
def test_what_amounts_to_one_pass_reads_as_it(course: Course, max_rows: int | None) -> None:
    model, batch = mlp()
    options = {"attainable": max_rows is None, "max_rows": max_rows}
    found = one_step(model, lambda m: course(m, *batch), **options)
    same(found, plain_step(**options))
    assert {r.rows_total for r in found.layers.values()} == {6}


def by_hook(model: nn.Module, x: Tensor, y: Tensor, factor: float) -> None:
    for parameter in model.parameters():
        parameter.register_hook(lambda g: factor * g)
    loss_of(model, (x, y)).backward()


def after_accumulation(model: nn.Module, x: Tensor, y: Tensor, factor: float) -> None:
    def weaken(parameter: Tensor) -> None:
        parameter.grad.mul_(factor)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(weaken)
    loss_of(model, (x, y)).backward()


@pytest.mark.parametrize("scale", [by_hook, after_accumulation, set_by_hand])
def test_a_gradient_that_is_scaled_has_a_factor(scale: Callable[..., None]) -> None:
    model, batch = mlp()
    found = one_step(model, lambda m: scale(m, *batch, factor=0.25))
    expected = one_step(mlp()[0], lambda m: (0.25 * loss_of(m, batch)).backward())
    same(found, expected, loosely=True)
    assert not found.notes
    for reading in found.layers.values():
        assert reading.gradient_factor == pytest.approx(0.25)


@pytest.mark.parametrize("fused", [False, True])
def test_amp_scaled_gradients_are_shown_unscaled(fused: bool) -> None:
    """Gradients are unscaled, whether by the scaler or, with a fused optimizer, by the step."""
    model, batch = mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    with Monitor(model, optimizer, on_error="raise") as monitor:
        scaler.scale(loss_of(model, batch)).backward()
        scaler.step(optimizer)
    same(monitor.latest, plain_step())
    for reading in monitor.latest.layers.values():
        assert reading.gradient_factor == pytest.approx(2.0**-12)


def test_an_end_at_which_all_steps_are_skipped_is_said() -> None:
    model, batch = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said = r"no step of the monitor's optimizer, .* was seen since step 2 was to be taken"
    with pytest.warns(UserWarning, match=said), Monitor(model, optimizer) as monitor:
        for step in range(68):
            loss = loss_of(model, batch)
            monitor.log_loss(loss)
            loss.backward()
            if step < 2:
                optimizer.step()


def test_a_step_that_the_scaler_skips_is_dropped_and_said() -> None:
    model, batch = mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, optimizer, on_error="raise") as monitor:
        scaler.scale(loss_of(model, batch) * torch.inf).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert not monitor.reports
        scaler.scale(loss_of(model, batch)).backward()
        scaler.step(optimizer)
    assert monitor.latest.step == 0
    assert monitor.latest.notes[0].startswith("Gradients were zeroed before a step was taken")
    same(monitor.latest, plain_step())


def test_a_fused_step_that_is_skipped_is_not_reported_as_a_step() -> None:
    model, batch = mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=True)
    with Monitor(model, optimizer, every_n_steps=1, on_error="raise") as monitor:
        for factor in (torch.inf, 1.0, 1.0):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, batch) * factor).backward()
            scaler.step(optimizer)
            scaler.update()
    assert not monitor.reports[0].layers
    assert "skipped the step" in monitor.reports[0].notes[0]
    for report in list(monitor.reports)[1:]:
        assert all(0 < r.parameter_cosine < 1 for r in report.layers.values())


def test_clipped_gradients_are_those_the_optimizer_sees() -> None:
    (model, batch), plain = mlp(), plain_step()
    norms: list[Tensor] = []
    clipped = one_step(
        model,
        lambda m: loss_of(m, batch).backward(),
        lambda m: norms.append(nn.utils.clip_grad_norm_(m.parameters(), 0.01)),
    )
    factor = 0.01 / (norms[0].item() + 1e-6)
    scaled = (
        *("update_ratio", "activation_gradient_rms", "gradient_norm", "update_norm", "update_rms"),
        "weight_update_ratio",
    )
    same(clipped, plain, but=(*scaled, "descent"))
    for path, reading in clipped.layers.items():
        for name in scaled:
            expected = factor * getattr(plain.layers[path], name)
            assert getattr(reading, name) == pytest.approx(expected)
        assert reading.gradient_factor == pytest.approx(factor)
        assert reading.descent == pytest.approx(plain.layers[path].descent * factor**2)


@pytest.mark.parametrize("zero_first", [True, False], ids=["zero-forward", "forward-zero"])
def test_gradients_zeroed_without_a_step(zero_first: bool) -> None:
    """Zeroing gradients discards their rows, in any order of zero_grad and forward pass."""
    model, batch = mlp()

    def backward(model: nn.Module) -> None:
        loss_of(model, batch).backward()
        if zero_first:
            model.zero_grad()
        loss = loss_of(model, batch)
        if not zero_first:
            model.zero_grad()
        loss.backward()

    found = one_step(model, backward)
    assert "zeroed before a step" in found.notes[0]
    same(found, plain_step())


def test_weights_that_are_changed_before_the_step_are_told() -> None:
    """Weights changed before the step, as by decay, are noted; the change is no update."""
    model, batch = mlp()

    @torch.no_grad()
    def decay(model: nn.Module) -> None:
        model[0].weight.mul_(0.9)

    found = one_step(model, lambda m: loss_of(m, batch).backward(), decay)
    (note,) = found.notes
    assert "weights of '0' were written to between" in note
    same(found, plain_step(), but=("weight_norm", "weight_update_ratio"))


def test_a_layer_frozen_during_another_networks_step() -> None:
    """A discriminator is frozen while its generator steps: those passes do not count for it."""
    critic, generator = nn.Linear(4, 1).double(), nn.Linear(3, 4).double()
    other = torch.optim.SGD(generator.parameters(), lr=0.1)
    noise = torch.randn(6, 3, dtype=torch.float64)

    def backward(critic: nn.Module) -> None:
        critic.requires_grad_(False)
        critic(generator(noise)).sum().backward()
        other.step()
        critic.requires_grad_(True)
        critic(generator(noise).detach()).square().sum().backward()

    reading = one_step(critic, backward).layers[""]
    assert reading.rows_total == 6
    assert reading.gradient_cosine > 0.5


def test_the_loss_scale_is_told_from_the_whole_gradient() -> None:
    """All entries are used: gradients of padded images are mostly zero at spaced entries."""
    model = nn.Linear(70_000, 3)
    x = torch.zeros(8, 70_000)
    x[:, 35_003] = torch.arange(8.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, optimizer, max_rows=3, on_error="raise") as monitor:
        scaler.scale(functional.cross_entropy(model(x), torch.arange(8) % 3)).backward()
        scaler.step(optimizer)
    reading = monitor.latest.layers[""]
    assert reading.gradient_factor == pytest.approx(2.0**-16)
    assert 0.01 < reading.effective_lr < 10


def penalised(batch: tuple[Tensor, Tensor], model: nn.Module) -> None:
    penalty = sum(p.square().sum() for p in model.parameters() if p.dim() > 1)
    (loss_of(model, batch) + 0.1 * penalty).backward()


def used_outside(batch: tuple[Tensor, Tensor], model: nn.Module) -> None:
    hidden = functional.linear(batch[0], model[0].weight).square().sum()
    (loss_of(model, batch) + hidden).backward()


@pytest.mark.parametrize("way", [penalised, used_outside])
def test_gradients_that_hold_more_than_the_rows_are_told(way: Callable[..., None]) -> None:
    """With a penalty, cosines are those of the rows, and agree with the slow reference."""
    (model, batch), (twin, _) = mlp(), mlp()
    backward = partial(way, batch)
    truth = reference.take_step(twin, torch.optim.SGD(twin.parameters(), lr=0.1), backward)
    found = one_step(model, backward, max_rows=None)
    assert any("holds more than these rows" in note for note in found.notes)
    expected = reference.measures(truth["0"])
    reading = found.layers["0"]
    for name in ("update_cosine", "effective_lr", "update_ratio", "descent"):
        assert getattr(reading, name) == pytest.approx(expected[name], rel=1e-9)


def _zeroed(passes: int, step: int, *, after: bool = False) -> Monitor:
    """Train with several backward passes per step, gradients zeroed before every `step`-th one."""
    model, batch = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Monitor(model, optimizer, every_n_steps=2, on_error="raise") as monitor:
        for number in range(9):
            if not after and number % step == 0:
                optimizer.zero_grad(set_to_none=bool(number % 4))
            for _ in range(passes):
                (loss_of(model, batch) / passes).backward()
            optimizer.step()
            if after and number % step == 0:
                optimizer.zero_grad()
    return monitor


def test_a_forgotten_zero_grad_is_a_finding_of_its_own() -> None:
    """A gradient that is never zeroed is of nearly the length of all gradients so far."""
    monitor = _zeroed(1, 100)
    first, *later = [r.layers["0"].earlier_share for r in monitor.reports]
    assert first == 0
    assert all(share > 0.6 for share in later)
    finding = monitor._outlet.running.findings()[0]
    assert (finding.name, finding.strength, finding.since) == ("not-zeroed", "act", 2)
    assert set(finding.layers) == set(monitor.reports[-1].layers)
    assert finding.advice[0].text.startswith("call optimizer.zero_grad() once for every step")


@pytest.mark.slow(one_in=2)
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("passes", [1, 4])
def test_accumulation_over_passes_is_no_forgotten_zero_grad(passes: int, after: bool) -> None:
    monitor = _zeroed(passes, 1, after=after)
    assert all(r.earlier_share == 0 for report in monitor.reports for r in report.layers.values())
    assert "not-zeroed" not in {f.name for f in monitor._outlet.running.findings()}


def test_a_rate_of_zero_harms_nobody_and_helps_nobody() -> None:
    model, batch = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    (report,) = trained(model, lambda m: loss_of(m, batch), optimizer=optimizer)
    for reading in report.layers.values():
        assert math.isnan(reading.harmed_fraction)
        assert math.isnan(reading.row_cosine_mean)
        assert math.isnan(reading.update_cosine)
        assert reading.effective_lr == reading.update_ratio == reading.descent == 0


@pytest.mark.parametrize("in_place", [False, True])
def test_a_hook_that_scales_the_gradient_of_an_output_counts(in_place: bool) -> None:
    """As in MuZero: the hook comes after the layer has run, and scales what the layer receives."""

    def scaled(gradient: Tensor) -> Tensor | None:
        return None if in_place and gradient.mul_(3) is gradient else gradient * 3

    def reading(scale: float) -> LayerReading:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3)).double()

        def loss(model: nn.Module) -> Tensor:
            hidden = model[:3](torch.randn(40, 6).double())
            if scale != 1:
                hidden.register_hook(scaled)
            return model[3](hidden).square().sum()

        return trained(model, loss)[0].layers["2"]

    found, plain = reading(3.0), reading(1.0)
    assert found.update_cosine == pytest.approx(plain.update_cosine, rel=1e-9)
    assert found.effective_lr == pytest.approx(plain.effective_lr, rel=1e-9)
    assert found.descent == pytest.approx(plain.descent * 9, rel=1e-9)


def loss_of_part(model: nn.Module, batch: tuple[Tensor, Tensor], part: slice) -> Tensor:
    return functional.cross_entropy(model(batch[0][part]), batch[1][part], reduction="sum")


FIRST, SECOND = slice(0, 3), slice(3, 6)


@pytest.mark.parametrize("hooked", [False, True])
def test_a_micro_batch_that_asks_for_nothing(hooked: bool) -> None:
    """A zero gradient has no defined factor; its rows are zero-gradient rows."""
    model, batch = mlp()

    def in_turn(model: nn.Module) -> None:
        for weight, part in ((0.0, FIRST), (1.0, SECOND)):
            (weight * loss_of_part(model, batch, part)).backward()

    alone = one_step(copy.deepcopy(model), lambda m: loss_of_part(m, batch, SECOND).backward())
    if hooked:
        for parameter in model.parameters():
            parameter.register_hook(lambda g: 1.0 * g)
    found = one_step(model, in_turn)
    same(found, alone, but=("idle_share",))
    assert not found.notes
    for reading in found.layers.values():
        assert (reading.rows_total, reading.idle_share) == (6, 0.5)


def class_token(model: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([model.token.expand(len(x), -1, -1), x], 1)


EMPTY: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(5),
    "convolution": lambda: nn.Conv1d(5, 3, 2, dilation=2),
    "class token": lambda: Computes(class_token, token=nn.Parameter(torch.randn(1, 1, 4))),
    "attention": lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0),
}


FIRST_OR_SECOND = [(name, sizes) for name in EMPTY for sizes in ((0, 3, 3), (3, 0, 3))]


@pytest.mark.slow(one_in=3)
@pytest.mark.parametrize(("name", "sizes"), FIRST_OR_SECOND)
def test_an_empty_micro_batch_leaves_the_readings_alone(name: str, sizes: Sequence[int]) -> None:
    torch.manual_seed(0)
    model = EMPTY[name]().double()
    parts = [torch.randn(size, 5, 4).double() for size in sizes]

    def in_turn(model: nn.Module, parts: list[Tensor]) -> None:
        for x in parts:
            model(x).square().sum().backward()

    options: dict[str, object] = {"max_rows": None, "attention": name == "attention"}
    some = [x for x in parts if len(x)]
    expected = one_step(copy.deepcopy(model), lambda m: in_turn(m, some), **options)
    found = one_step(model, lambda m: in_turn(m, parts), **options)
    same(found, expected)
    assert (found.unsupported, found.notes) == (expected.unsupported, expected.notes)
    assert found.attention.keys() == expected.attention.keys()
    assert bool(found.attention) == (name == "attention")
