"""Which gradient is shown: accumulated, unscaled, clipped, and nothing that made no step.

Every test compares with a plain run of the same step, or with the truth computed by hand.
"""

import copy

import pytest
import torch
from cases import loss_of
from setups import mlp, one_step, same
from torch import nn
from torch.nn import functional

from adiv_monitor import Monitor
from adiv_monitor.updates import some


def test_micro_batches_are_one_batch() -> None:
    """Three accumulated micro-batches, one of them smaller, read like the whole batch."""
    model, (x, y) = mlp()
    twin = copy.deepcopy(model)

    def in_parts(model: nn.Module) -> None:
        for part in (slice(0, 3), slice(3, 5), slice(5, 6)):
            logits = model(x[part])
            (functional.cross_entropy(logits, y[part], reduction="sum") / len(x)).backward()

    whole = one_step(twin, lambda m: loss_of(m, (x, y)).backward())
    parts = one_step(model, in_parts)
    same(parts, whole)
    assert {r.rows_total for r in parts.layers.values()} == {6}


@pytest.mark.parametrize("fused", [False, True])
def test_amp_scaled_gradients_are_shown_unscaled(fused: bool) -> None:
    """Whether the scaler unscales them or, as with a fused optimizer, the step itself."""
    model, batch = mlp()
    plain = one_step(copy.deepcopy(model), lambda m: loss_of(m, batch).backward())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    with Monitor(model, optimizer, on_error="raise") as monitor:
        scaler.scale(loss_of(model, batch)).backward()
        scaler.step(optimizer)
    assert monitor.latest is not None
    same(monitor.latest, plain)
    for reading in monitor.latest.layers.values():
        assert reading.gradient_factor == pytest.approx(2.0**-12)


def test_a_step_that_the_scaler_skips_is_dropped_and_said() -> None:
    model, batch = mlp()
    twin = copy.deepcopy(model)
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
    assert monitor.latest is not None
    assert monitor.latest.step == 0
    assert "zeroed before a step" in monitor.latest.notes[0]
    same(monitor.latest, one_step(twin, lambda m: loss_of(m, batch).backward()))


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


def test_a_step_inside_autocast_is_measured_in_full_precision() -> None:
    model = nn.Sequential(nn.Linear(5, 6, bias=False), nn.Tanh(), nn.Linear(6, 3))
    x, y = torch.randn(8, 5), torch.randint(3, (8,))
    found = []
    for inside in (False, True):
        twin = copy.deepcopy(model)
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
        with Monitor(twin, optimizer, on_error="raise") as monitor:
            functional.cross_entropy(twin(x), y).backward()
            with torch.autocast("cpu", enabled=inside):
                optimizer.step()
        assert monitor.latest is not None
        found.append(monitor.latest)
    same(*found)


def test_only_rows_of_an_embedding_that_were_used_tell_the_loss_scale() -> None:
    """Of a large table nearly every gradient entry is zero; the factor is right all the same."""
    model = nn.Embedding(50_000, 8)
    tokens = torch.tensor([3, 17, 49_000])
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, optimizer, on_error="raise") as monitor:
        scaler.scale(model(tokens).square().sum()).backward()
        scaler.step(optimizer)
    assert monitor.latest is not None
    reading = monitor.latest.layers[""]
    assert reading.gradient_factor == pytest.approx(1 / 4096)
    assert reading.effective_lr == pytest.approx(0.1, rel=1e-4)


def test_clipped_gradients_are_those_the_optimizer_sees() -> None:
    model, batch = mlp()
    plain = one_step(copy.deepcopy(model), lambda m: loss_of(m, batch).backward())
    norm = torch.zeros(())

    def clip(model: nn.Module) -> None:
        nonlocal norm
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    clipped = one_step(model, lambda m: loss_of(m, batch).backward(), clip)
    factor = 0.01 / (norm.item() + 1e-6)
    same(clipped, plain, but=("update_ratio", "descent"))
    for path, reading in clipped.layers.items():
        assert reading.gradient_factor == pytest.approx(factor)
        assert reading.descent == pytest.approx(plain.layers[path].descent * factor**2)


@pytest.mark.parametrize("zero_first", [True, False], ids=["zero-forward", "forward-zero"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_zeroed_without_a_step(set_to_none: bool, zero_first: bool) -> None:
    """Whatever the order of zero_grad and the forward pass, zeroed gradients take their rows."""
    model, batch = mlp()
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, optimizer, on_error="raise") as monitor:
        loss_of(model, batch).backward()
        if zero_first:
            optimizer.zero_grad(set_to_none)
        loss = loss_of(model, batch)
        if not zero_first:
            optimizer.zero_grad(set_to_none)
        loss.backward()
        optimizer.step()
    assert monitor.latest is not None
    assert "zeroed before a step" in monitor.latest.notes[0]
    same(monitor.latest, one_step(twin, lambda m: loss_of(m, batch).backward()))


def test_two_losses_through_one_graph_add_up() -> None:
    model, (x, y) = mlp()

    def twice(model: nn.Module) -> None:
        logits = model(x)
        functional.cross_entropy(logits, y).backward(retain_graph=True)
        logits.square().mean().backward()

    def once(model: nn.Module) -> None:
        logits = model(x)
        (functional.cross_entropy(logits, y) + logits.square().mean()).backward()

    same(one_step(copy.deepcopy(model), twice), one_step(model, once))


def test_gradients_that_reach_no_parameter_are_no_part_of_the_step() -> None:
    """An attack on the input first, as in adversarial training: only the training pass counts."""
    model, (x, y) = mlp()

    def attacked(model: nn.Module) -> None:
        probe = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(functional.cross_entropy(model(probe), y), probe)
        functional.cross_entropy(model(x + 0 * slope), y).backward()

    expected = one_step(copy.deepcopy(model), lambda m: loss_of(m, (x, y)).backward())
    same(one_step(copy.deepcopy(model), attacked), expected)
    attained = one_step(copy.deepcopy(model), attacked, attainable=True)
    alone = one_step(model, lambda m: loss_of(m, (x, y)).backward(), attainable=True)
    same(attained, alone)


def test_gradients_taken_without_accumulating_are_no_part_of_the_step() -> None:
    """`autograd.grad` for the weights, with `.grad` zeroed in place: nothing is lost."""
    model, batch = mlp()
    expected = one_step(copy.deepcopy(model), lambda m: loss_of(m, batch).backward())

    def probe_then_train(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for _ in range(2):
            torch.autograd.grad(loss_of(model, batch), list(model.parameters()))
        loss_of(model, batch).backward()

    same(one_step(model, probe_then_train), expected)


def test_a_layer_frozen_during_another_networks_step() -> None:
    """A discriminator is frozen while its generator steps: those passes are not its own."""
    critic, generator = nn.Linear(4, 1).double(), nn.Linear(3, 4).double()
    optimizers = {
        "critic": torch.optim.SGD(critic.parameters(), lr=0.1),
        "generator": torch.optim.SGD(generator.parameters(), lr=0.1),
    }
    noise = torch.randn(6, 3, dtype=torch.float64)
    with Monitor(critic, optimizers["critic"], on_error="raise") as monitor:
        critic.requires_grad_(False)
        critic(generator(noise)).sum().backward()
        optimizers["generator"].step()
        critic.requires_grad_(True)
        fake = generator(noise).detach()
        critic(fake).square().sum().backward()
        optimizers["critic"].step()
    assert monitor.latest is not None
    assert monitor.latest.layers[""].rows_total == 6
    assert monitor.latest.layers[""].gradient_cosine > 0.5


def test_evaluation_with_gradients_on_does_not_use_up_the_rows() -> None:
    model, batch = mlp()
    expected = one_step(copy.deepcopy(model), lambda m: loss_of(m, batch).backward(), max_rows=6)

    def after_rollouts(model: nn.Module) -> None:
        for _ in range(20):
            model(batch[0])
        loss_of(model, batch).backward()

    same(one_step(model, after_rollouts, max_rows=6), expected)


def test_what_lies_between_the_entries_of_a_gradient_does_not_count() -> None:
    """Every second number of a buffer, or one number for all: as their contiguous copies."""
    buffer = torch.randn(200, 200, 2)
    transposed = torch.randn(300, 200).t()
    for gradient in (buffer[..., 0], buffer[:150, 50:, 1], torch.ones(1).expand(200, 200)):
        assert torch.equal(some(gradient), some(gradient.contiguous()))
    assert torch.equal(some(transposed), some(transposed.t()))  # in the order of memory
    assert some(transposed).data_ptr() == transposed.data_ptr()
