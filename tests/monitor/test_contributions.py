"""A check shows whether a gradient is that of the rows, however few rows are sampled.

No sample could show these differences: each is smaller than the sampling error of 16 out of 512
rows.
"""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from adiv_layers import AffineLikeLinear
from computes import Computes
from setups import one_step, trained
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from adiv_monitor import StepReport
from adiv_monitor.capture.selection import listed

FROM_ROWS = "estimated from rows alone"
MORE, APART = "holds more than these rows", "multiplied by different factors"


def small() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    return model, torch.randn(512, 20, dtype=torch.float64), torch.randint(4, (512,))


def penalised(weight: float) -> Callable[[nn.Module], Tensor]:
    return lambda model: weight * sum(p.square().sum() for p in model.parameters())


def clip_each(model: nn.Module) -> None:
    for parameter in model.parameters():
        nn.utils.clip_grad_norm_([parameter], 0.01)


def edit_bias(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.grad *= 1.1


def freeze_a_row(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad[0] = 0


CHANGES = {
    "a small penalty": (penalised(0.001), None, None, MORE),
    "a penalty on biases": (
        lambda model: 0.01 * sum(p.square().sum() for p in model.parameters() if p.dim() == 1),
        *(None, None, MORE),
    ),
    "a mask": (None, lambda g: g * (torch.arange(g.numel()) % 16 > 0).reshape(g.shape), None, MORE),
    "noise": (None, lambda g: g + 0.01 * g.norm() * torch.ones_like(g), None, MORE),
    "each clipped": (None, None, clip_each, APART),
    "biases alone": (None, None, edit_bias, APART),
    "a frozen row": (None, None, freeze_a_row, MORE),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_not_of_the_rows_is_told_at_once(change: str) -> None:
    loss, hook, between, expected = CHANGES[change]
    model, x, y = small()
    for parameter in model.parameters() if hook else ():
        parameter.register_hook(hook)

    def backward(model: nn.Module) -> None:
        value = functional.cross_entropy(model(x), y)
        (value if loss is None else value + loss(model)).backward()

    found = one_step(model, backward, between or (lambda model: None), max_rows=16)
    (note,) = found.notes
    assert expected in note and " of '0', '2' " in note
    for reading in found.layers.values():
        assert reading.standard_error["effective_lr"] > 0


def test_what_begins_while_one_layer_is_checked_is_soon_told_of_all() -> None:
    model, x, y = small()
    penalties = iter([0, 0, 0, 0.001, 0.001, 0.001])

    def loss(model: nn.Module) -> Tensor:
        return functional.cross_entropy(model(x), y) + penalised(next(penalties))(model)

    *_, sound, begins, _, later = trained(model, loss, 6, max_rows=16)
    assert not sound.notes
    assert begins.notes[0].startswith("The gradient of '2' holds more")
    assert begins.notes[1].startswith("The gradient of '0' seems to hold more")
    assert later.notes[0].startswith("The gradient of '0', '2' holds more")


def attends(m: nn.Module, x: Tensor) -> Tensor:
    """Attend: the gradient of `key.bias` is exactly zero, as it shifts all scores of a query."""
    return functional.scaled_dot_product_attention(m.query(x), m.key(x), m.value(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gradient_of_rounding_errors_leads_to_no_conclusion(dtype: torch.dtype) -> None:
    """A gradient of rounding errors differs between devices and ranks; it changes no reading."""
    torch.manual_seed(0)
    layers = {name: nn.Linear(8, 8, dtype=dtype) for name in ("query", "key", "value")}
    model, x = Computes(attends, **layers), torch.randn(16, 12, 8, dtype=dtype)

    def step(make: Callable[[Tensor], Tensor]) -> StepReport:
        def between(model: nn.Module) -> None:
            gradient = model.key.bias.grad
            gradient.copy_(make(torch.linspace(-1, 1, 8, dtype=dtype)))

        return one_step(
            copy.deepcopy(model), lambda model: model(x).square().sum().backward(), between
        )

    eps = torch.finfo(dtype).eps
    assert not step(lambda other: eps * other).notes
    assert not step(lambda other: -eps * other).notes
    (note,) = step(lambda other: 1e5 * eps * other).notes  # beside a weight's gradient of norm 10
    assert MORE in note and "of 'key' " in note


def checkpointed(model: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(model.inner, x.tanh(), use_reentrant=True)


def image(module: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Unflatten(-1, (2, 1, 3)), nn.Flatten(0, 1), module)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(6, 6),
    "conv": lambda: image(nn.Conv2d(2, 6, (1, 2))),
    "re-entrant": lambda: Computes(checkpointed, inner=nn.Linear(6, 6)),
    "attention": lambda: nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True),
    "affine-like": lambda: AffineLikeLinear(6, 6),
}


@pytest.mark.slow(one_in=3)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_penalty_is_noted_for_every_kind_of_layer(layer: str) -> None:
    """A penalty is noted for every kind of layer; without it there is no such note."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), LAYERS[layer]())
    x = torch.randn(40, 5, 6)

    def step(model: nn.Module, weight: float) -> StepReport:
        def backward(model: nn.Module) -> None:
            loss = model(x).square().mean()
            (loss + penalised(weight)(model) if weight else loss).backward()

        return one_step(model, backward, max_rows=16)

    alone = step(copy.deepcopy(model), 0)
    assert not [note for note in alone.notes if FROM_ROWS in note]
    found = step(model, 0.1)
    (note,) = [note for note in found.notes if MORE in note]
    paths = [path for path, reading in found.layers.items() if reading.kind != "gain"]
    assert len(paths) > 1
    assert f" of {listed(paths)} " in note


def halves(model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    return [
        functional.cross_entropy(model(x[part]), y[part]) for part in (slice(256), slice(256, None))
    ]


def micro_batches(model: nn.Module, losses: list[Tensor]) -> None:
    for loss in losses:
        loss.backward()


def clipped_between(model: nn.Module, losses: list[Tensor]) -> None:
    for loss in losses:
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def zeroed_between(model: nn.Module, losses: list[Tensor], *, set_to_none: bool = True) -> None:
    losses[0].backward()
    model.zero_grad(set_to_none=set_to_none)
    losses[1].backward()


def looked_at_between(model: nn.Module, losses: list[Tensor]) -> None:
    losses[0].backward()
    torch.autograd.grad(losses[1], list(model.parameters()), retain_graph=True)
    losses[1].backward()


def twice(model: nn.Module, losses: list[Tensor]) -> None:
    losses[0].backward(retain_graph=True)
    (losses[0] + losses[1]).backward()


def first_layer_alone(model: nn.Module, losses: list[Tensor]) -> None:
    losses[0].backward()
    losses[1].backward(inputs=list(model[0].parameters()))


def by_hand(model: nn.Module, losses: list[Tensor]) -> None:
    parameters = list(model.parameters())
    for parameter, gradient in zip(
        parameters, torch.autograd.grad(sum(losses), parameters), strict=True
    ):
        parameter.grad = gradient


PASSES = {
    "micro-batches": micro_batches,
    "removed between": zeroed_between,
    "looked at between": looked_at_between,
    "twice": twice,
    "first layer alone": first_layer_alone,
    "by hand": by_hand,
}


@pytest.mark.parametrize("passes", PASSES)
def test_what_backward_passes_do_is_followed(passes: str) -> None:
    """Without a penalty nothing is noted; with one, every pass shows it."""
    model, x, y = small()

    def step(model: nn.Module, weight: float) -> StepReport:
        def backward(model: nn.Module) -> None:
            losses = halves(model, x, y)
            if weight:
                losses = [loss + penalised(weight)(model) for loss in losses]
            PASSES[passes](model, losses)

        return one_step(model, backward, max_rows=16)

    assert not [note for note in step(copy.deepcopy(model), 0).notes if FROM_ROWS in note]
    (note,) = [note for note in step(model, 0.001).notes if FROM_ROWS in note]
    assert MORE in note and " of '0', '2' " in note


@pytest.mark.parametrize("edits", [clipped_between, partial(zeroed_between, set_to_none=False)])
def test_passes_that_count_differently_are_told(
    edits: Callable[[nn.Module, list[Tensor]], None],
) -> None:
    """Only the check sees what is done in place to a gradient between two passes."""
    model, x, y = small()
    found = one_step(model, lambda m: edits(m, halves(m, x, y)), max_rows=16)
    (note,) = [note for note in found.notes if FROM_ROWS in note]
    assert MORE in note and " of '0', '2' " in note
