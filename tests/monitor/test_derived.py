"""Weights computed from parameters: what is measured agrees with torch's own `jvp`; float64.

Views, casts and sums with constants are followed. Any other weight, also that of a parametrization,
is measured through the module that computes it, or refused with a reason.
"""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from computes import Computes
from setups import cosine, trained
from torch import Tensor, nn
from torch.autograd.functional import jvp
from torch.func import functional_call
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils.spectral_norm import spectral_norm as old_spectral_norm

from adiv_monitor import Monitor, StepReport

NEED_SCALES = {"diagonal_cosine", "interference_ratio", "scale_mean", "scale_cv", "scale_p50"}
X = torch.linspace(-2, 3, 20, dtype=torch.float64).view(5, 4).sin()
Function = Callable[[nn.Module, Tensor], Tensor]


def real(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, dtype=torch.float64))


def linear() -> nn.Linear:
    return nn.Linear(4, 3).double()


def parametrized(part: nn.Module) -> nn.Module:
    module = linear()
    parametrize.register_parametrization(module, "weight", part)
    return module


def of(function: Function, **more: Tensor) -> Callable[[], nn.Module]:
    """Return what builds a layer with weight (3, 4)."""
    return lambda: Computes(function, weight=real(3, 4), **more)


def low_rank() -> nn.Module:
    return Computes(lambda m, x: x + 0.5 * m.up @ m.down, down=real(2, 4), up=real(3, 2))


def frozen_base() -> nn.Module:
    module = parametrized(low_rank())
    module.parametrizations.weight.original.requires_grad_(False)
    return module


def orthogonal() -> nn.Module:
    return parametrizations.orthogonal(
        nn.Linear(4, 4).double(), orthogonal_map="cayley", use_trivialization=False
    )


MASK = torch.ones(3, 4, dtype=torch.float64).tril()
# Their weights are moved as their parameters are: they read as if these were used directly.
MOVED: dict[str, Function] = {
    "clone": lambda m, x: functional.linear(x, m.weight.clone(), m.bias.clone()),
    "plus a constant": lambda m, x: functional.linear(x, 1.0 + m.weight, m.bias + m.mask[0, :3]),
    "cast": lambda m, x: functional.linear(x, m.weight.to(x.dtype, copy=True), m.bias.type_as(x)),
    "another layout": lambda m, x: functional.linear(x, m.weight.t().contiguous().t(), m.bias),
    "a view of a copy": lambda m, x: functional.linear(x, m.weight.flatten().clone().view(3, 4)),
}
# Any other weight is measured through its module.
WHOLE: dict[str, Callable[[], nn.Module]] = {
    "masked": of(lambda m, x: functional.linear(x, m.weight * m.mask), mask=nn.Buffer(MASK)),
    "pruned": lambda: prune.random_unstructured(linear(), "weight", 0.5),
    "scaled": of(lambda m, x: functional.linear(x, 0.3 * m.weight, 2 + m.b), b=real(3)),
    "weight norm": lambda: parametrizations.weight_norm(linear()),
    "spectral norm": lambda: parametrizations.spectral_norm(linear()),
    "orthogonal": orthogonal,
    "low rank": lambda: parametrized(low_rank()),
    "low rank over a frozen weight": frozen_base,
    "a convolution's": lambda: parametrizations.weight_norm(nn.Conv1d(1, 3, 2).double()),
    "normalised": of(lambda m, x: functional.linear(x, functional.normalize(m.weight))),
    "a sum": of(lambda m, x: functional.linear(x, m.weight + 2 * m.other), other=real(3, 4)),
    "changed without gradients": of(lambda m, x: functional.linear(x, halved(m.weight))),
    "complex": lambda: Computes(
        lambda m, x: functional.linear(x, torch.view_as_complex(m.pairs).abs()), pairs=real(3, 4, 2)
    ),
    "learned activation": lambda: Computes(
        lambda m, x: x * torch.special.expit(torch.logaddexp(m.beta, x)), beta=real(4)
    ),
    "fused attention": lambda: Computes(
        lambda m, x: functional.scaled_dot_product_attention(*[(x.abs() ** m.power)[None]] * 3)[0],
        power=real(4),
    ),
    "old weight norm": lambda: quietly(nn.utils.weight_norm, linear()),
    "old spectral norm": lambda: old_spectral_norm(linear()).eval(),
}


def quietly(change: Callable[[nn.Module], nn.Module], module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return change(module)


def assembled(bias: Tensor) -> Tensor:
    made = torch.zeros(3, dtype=bias.dtype)
    made[:1] = bias[:1]
    made[1:] += 2 * bias[1:]
    return made


def halved(weight: Tensor) -> Tensor:
    weight = weight * 2
    with torch.no_grad():
        weight.mul_(0.5)
    return weight


def stepped(module: nn.Module, *, calls: int = 1, **options: Any) -> tuple[StepReport, Tensor]:
    """Take a step; return its report, and (e, d, G) of the output by torch's `jvp`."""
    x = X[:, None] if isinstance(module, nn.Conv1d) else X
    optimizer = torch.optim.AdamW((p for p in module.parameters() if p.requires_grad), lr=0.01)
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    seen: list[Tensor] = []
    with Monitor(module, optimizer, on_error="raise", max_rows=None, **options) as monitor:
        for _ in range(calls):
            z = module(x)
            z.register_hook(seen.append)
            (torch.tanh(z) * torch.linspace(1, 2, z.numel()).view_as(z)).sum().backward()
        gamma = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone()
                 for n, p in module.named_parameters()}  # fmt: skip
        optimizer.step()
    u = {n: before[n] - p.detach() for n, p in module.named_parameters()}
    module.eval()  # stops power iterations

    def output(*values: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return functional_call(module, dict(zip(before, values, strict=True)), (x,))

    e, d = (jvp(output, tuple(before.values()), tuple(t.values()))[1] for t in (gamma, u))
    return monitor.latest, torch.stack([e.flatten(), d.flatten(), seen[0].flatten()])


def agrees(report: StepReport, expected: Tensor, rel: float = 1e-9) -> None:
    """Assert that one layer has the cosines of its vectors, and the whole descent."""
    (reading,) = report.layers.values()
    e, d, G = expected
    assert (report.coverage, report.unsupported) == (1, {})
    assert reading.gradient_cosine == pytest.approx(cosine(e, G), rel=rel)
    assert reading.update_cosine == pytest.approx(cosine(d, G), rel=rel)


@pytest.mark.parametrize("name", MOVED)
def test_what_moves_as_its_parameter_reads_as_that(name: str) -> None:
    def reading(forward: Function) -> dict[str, float]:
        torch.manual_seed(4)
        module = Computes(forward, weight=real(3, 4), mask=nn.Buffer(MASK))
        if name != "a view of a copy":
            module.bias = real(3)
        report, _ = stepped(module, attainable=True)
        assert list(report.layers) == [""]
        assert (report.coverage, report.notes) == (1, ())
        return report.layers[""].measures()

    def plain(m: nn.Module, x: Tensor) -> Tensor:
        shift = 1.0 if name == "plus a constant" else 0.0
        bias = getattr(m, "bias", None)
        return functional.linear(x, m.weight, bias) + shift * (
            x.sum(1, keepdim=True) + m.mask[0, :3]
        )

    found, expected = reading(MOVED[name]), reading(plain)
    if name == "plus a constant":  # the layer's outputs are larger by that
        for key in ["update_ratio", *(key for key in found if key.startswith("activation_"))]:
            del found[key], expected[key]
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("name", WHOLE)
def test_any_other_weight_is_measured_through_its_module(name: str) -> None:
    torch.manual_seed(3)
    report, expected = stepped(WHOLE[name]())
    (reading,) = report.layers.values()
    agrees(report, expected)
    assert reading.kind == "module"
    assert reading.measures().keys().isdisjoint(NEED_SCALES)


@pytest.mark.parametrize(
    ("make", "shape", "half"),
    [
        (lambda: nn.Conv1d(2, 3, 1), (5, 2, 6), (..., slice(3))),
        (lambda: nn.Linear(2, 3), (5, 6, 4, 2), (slice(None), slice(3))),
    ],
)
def test_places_are_the_rows_of_convolutions_and_linear_maps(
    make: Callable[[], nn.Module], shape: tuple[int, ...], half: tuple[Any, ...]
) -> None:
    for module in map(nn.Sequential, (make(), parametrizations.weight_norm(make()))):
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        with Monitor(module, optimizer, max_rows=None) as monitor:
            module(torch.randn(shape))[half].square().sum().backward()
            optimizer.step()
            assert monitor.latest is not None
            assert monitor.latest.layers["0"].idle_share == 0.5


def test_a_layer_has_the_rate_of_its_largest_parameter() -> None:
    module = nn.Sequential(parametrizations.weight_norm(linear()))
    optimizer = torch.optim.SGD({"params": [p], "lr": p.numel() / 10} for p in module.parameters())
    with Monitor(module, optimizer) as monitor:
        module(X).square().sum().backward()
        optimizer.step()
        assert monitor.latest is not None
        assert monitor.latest.learning_rate("0") == 1.2


def test_a_bias_that_is_written_to_is_measured_through_its_module() -> None:
    """The weight beside it has a reading of its own."""
    torch.manual_seed(3)
    held = {"weight": real(3, 4), "b": real(3)}
    report, _ = stepped(
        Computes(lambda m, x: functional.linear(x, m.weight, assembled(m.b)), **held)
    )
    assert {path: of.kind for path, of in report.layers.items()} == {"": "linear", "b": "module"}
    assert (report.coverage, report.unsupported) == (1, {})


def test_a_parametrization_that_draws_is_measured_with_its_module() -> None:
    report, _ = stepped(parametrized(Computes(lambda m, x: functional.dropout(x, 0.5))), calls=2)
    (reading,) = report.layers.values()
    assert (report.coverage, reading.kind, reading.rows_total) == (1, "module", 10)


def test_data_that_is_written_into_a_constant_is_data() -> None:
    """A buffer that is created empty and filled with the input counts as data."""

    def padded(m: nn.Module, x: Tensor) -> Tensor:
        held = torch.zeros(5, 6, dtype=x.dtype)
        held[:, 1:5] = x
        return held * m.weight

    (report,) = trained(Computes(padded, weight=real(6)), lambda module: module(X).sum())
    assert report.layers[""].kind == "gain"
    assert report.layers[""].rows_total == 5


def overlapping(m: nn.Module, x: Tensor) -> Tensor:
    """Two uses of parts of one weight that share a row."""
    return torch.cat([x @ m.w[:3].T, x @ m.w[2:].T], dim=1)


def test_parts_that_overlap_are_told_by_the_check() -> None:
    torch.manual_seed(0)
    model = Computes(overlapping, w=nn.Parameter(torch.randn(5, 4)))
    (report,) = trained(model, lambda model: model(torch.randn(16, 4)).square().sum())
    assert [*report.layers] == ["w[0:3]", "w[2:5]"] and report.coverage == 1
    assert "'w[0:3]', 'w[2:5]' holds more than these rows" in " ".join(report.notes)
