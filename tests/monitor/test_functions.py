"""Every function's rule against a slow reference that calls the function again; float64, 1e-9.

The reference takes the step and calls the function with the new parameters and the old inputs
(`tests/reference.py`). It uses no code of the monitor. Cases: `tests/function_cases.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import reference
import torch
from function_cases import CASES, Caller, FunctionCase, Of, grouped_mm, written
from rules import found, layouts, trained_of
from setups import same, trained
from torch import Tensor
from torch.nn import functional

from adiv_monitor import Monitor, StepReport
from adiv_monitor.capture.sampling import draw
from adiv_monitor.features import Rows
from adiv_monitor.features.uses import Use

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
}
# Those of scales that are not known from one pass.
OF_SCALES = {"diagonal_cosine", "scale_mean", "scale_cv", "scale_max", "idle_share"}


KINDS = {"linear", "convolution", "embedding", "experts", "gain", "offset"}


def loss_of(z: Tensor, *, ignored: int = 0) -> Tensor:
    """Return a loss with a different gradient at every entry, except the first ones, if ignored."""
    z = z[ignored:] if z.dim() and len(z) > ignored else z
    aims = torch.linspace(-1.0, 2.0, z.numel(), dtype=z.dtype).reshape(z.shape)
    return (z - aims).square().sum() + (z * aims).sin().sum()


def measured(
    case: FunctionCase, optimizer: str, max_rows: int | None, ignored: int = 0
) -> tuple[StepReport, dict[str, dict[str, float]]]:
    """Take one measured step; return all measures of every use and their truth."""
    model, inputs = case.model(), case.data()
    own = OPTIMIZERS[optimizer](model.parameters())
    old = {name: p.detach().clone() for name, p in model._parameters.items()}
    asked = {"max_rows": max_rows, "attainable": max_rows is None}  # this takes all rows
    with Monitor(model, own, on_error="raise", **asked) as monitor:
        loss_of(model(*inputs), ignored=ignored).backward()
        gradient = {name: p.grad.clone() for name, p in model._parameters.items()}
        own.step()
    assert monitor.latest is not None
    new = {name: p.detach() for name, p in model._parameters.items()}

    def G_of(z: Tensor) -> Tensor:
        (G,) = torch.autograd.grad(loss_of(z, ignored=ignored), z)
        return G

    truths = {use.path: truth_of(model, inputs, use, G_of, old, new, gradient) for use in case.uses}
    for expected in truths.values():
        expected["update_rms"] /= own.param_groups[0]["lr"]
    return monitor.latest, truths


def truth_of(
    model: Caller,
    inputs: Sequence[Tensor],
    use: Of,
    G_of: Callable[[Tensor], Tensor],
    old: dict[str, Tensor],
    new: dict[str, Tensor],
    gradient: dict[str, Tensor],
) -> dict[str, float]:
    G = G_of(model.called(old, *inputs).requires_grad_())
    truth = reference.function_truth(
        lambda parameters: use.rows(model.called(parameters, *inputs)),
        old,
        new,
        gradient,
        use.rows(G),
        weight=use.weight,
        bias=use.bias,
        groups=use.groups,
    )
    expected = reference.measures(truth)
    expected["attainable_cosine"] = reference.attainable_cosine(truth)
    expected["rows_total"] = len(truth.G)
    return expected


@pytest.mark.slow(one_in=17)
@pytest.mark.parametrize(("optimizer", "ignored"), [("sgd", 0), ("adamw", 0), ("adamw", 1)])
@pytest.mark.parametrize("name", CASES)
def test_every_measure(name: str, optimizer: str, ignored: int) -> None:
    """Measures agree also if the loss ignores a part: zero-gradient rows do not count."""
    report, truths = measured(CASES[name], optimizer, None, ignored)
    assert report.coverage == 1.0
    assert not report.unsupported
    assert not report.notes
    assert report.layers.keys() == truths.keys()
    for path, expected in truths.items():
        reading = report.layers[path]
        assert reading.kind in KINDS
        assert reading.rows_total == reading.rows_seen == expected.pop("rows_total")
        assert not reading.standard_error
        for measure, value in reading.measures().items():
            if value is not None and "expert" not in measure:  # see test_sizes.py
                assert value == pytest.approx(expected[measure], rel=1e-9, abs=1e-9, nan_ok=True), (
                    f"{measure} of {path}"
                )


@pytest.mark.slow(one_in=9)
@pytest.mark.parametrize("name", CASES)
def test_a_result_that_is_changed_in_place(name: str) -> None:
    """Many results are views, such as of a product of matrices, whose nodes are replaced then."""
    reports = []
    for tanh in (torch.tanh, torch.tanh_):
        model, inputs = CASES[name].model(), CASES[name].data()
        loss = lambda model, x=inputs, tanh=tanh: loss_of(tanh(model(*x)))  # noqa: E731
        reports += trained(model, loss, max_rows=3)
    assert reports[0].layers.keys() == {use.path for use in CASES[name].uses}
    same(reports[1], reports[0])


@pytest.mark.slow(one_in=9, first=1)
@pytest.mark.parametrize("name", CASES)
def test_what_is_exact_stays_so_when_rows_are_sampled(name: str) -> None:
    case = CASES[name]
    report, truths = measured(case, "adamw", 3)
    assert report.layers.keys() == truths.keys()
    for use in case.uses:
        reading, expected = report.layers[use.path], truths[use.path]
        total = expected.pop("rows_total")
        assert (reading.rows_seen, reading.rows_total) == (min(3, total), total)
        allowed = (
            set()
            if total <= 3
            else reference.SAMPLED
            if use.one_pass
            else reference.SAMPLED | OF_SCALES
        )
        assert reading.standard_error.keys() <= allowed
        for measure, value in reading.measures().items():
            if value is not None and measure not in allowed and "expert" not in measure:
                assert value == pytest.approx(expected[measure], rel=1e-9, abs=1e-9, nan_ok=True), (
                    f"{measure} of {use.path}"
                )


# --- the rules themselves ------------------------------------------------------------------------


def seen(
    model: Caller, parameters: dict[str, Tensor], inputs: Sequence[Tensor], of: Of
) -> tuple[Use, Tensor]:
    """Return the use that a rule finds, and the function's result."""
    leaves = {name: p.detach().clone().requires_grad_() for name, p in parameters.items()}
    lead = leaves[of.path]
    for use, made in found(lambda: model.called(leaves, *inputs), leaves.values()):
        source = use.bias if use.weight is None else use.weight
        if source is lead or source._base is lead:
            return use, made.detach()
    raise AssertionError(f"no rule for {of.path}")


def some(total: int, count: int) -> np.ndarray | None:
    return draw((total,), count, np.random.default_rng(0)).chosen


# The hooks that keep a function's overwritten inputs for the rules are absent here.
NOT_OVERWRITING = [name for name in CASES if not CASES[name].overwrites]


@pytest.mark.parametrize("name", NOT_OVERWRITING)
def test_rows_move_with_the_parameters_by_these_features(name: str) -> None:
    """Features predict the change of all rows and of some, in every memory layout of the inputs."""
    case = CASES[name]
    model = case.model()
    old = {name: p.detach() for name, p in model._parameters.items()}
    for inputs in layouts(case.data()):
        for of in case.uses:
            own = [name for name in (of.weight, of.bias) if name is not None]
            new = {name: 2 * p - 1 if name in own else p for name, p in old.items()}
            use, z = seen(model, old, inputs, of)
            moved, z_moved = seen(model, new, inputs, of)
            change = use.layout(z_moved) - use.layout(z)
            total = change[..., 0].numel()
            for count in (total, 3, 1):
                rows = Rows(tuple(change.shape[:-1]), some(total, count))
                features = use.features(rows)
                predicted = torch.zeros_like(rows.take(change))
                if use.weight is not None and moved.weight is not None:
                    by_weight = features.by_weight(use.shaped(moved.weight - use.weight))
                    predicted = predicted + by_weight
                if use.bias is not None and moved.bias is not None:
                    predicted = predicted + features.by_bias(moved.bias - use.bias)
                # The rows of other tokens, and those that a mask leaves out, do not matter.
                trained = trained_of(features) * rows.take(use.layout(torch.ones_like(z)))
                expected = rows.take(change) * trained
                torch.testing.assert_close(predicted * trained, expected, rtol=0, atol=1e-11)


# --- uses without an exact rule are measured through their module --------------------------------

NOT_LINEAR: dict[str, tuple[Callable[..., Tensor], tuple[int, ...]]] = {
    "quotient": (lambda p, x: x / p.w, (3,)),
    "divisor": (lambda p, x: torch.addcdiv(x, x, p.w), (3,)),
    "power": (lambda p, x: x.abs() ** p.w, (3,)),
    "diagonal": (lambda p, x: torch.einsum("bi,ii->b", x, p.w), (3, 3)),
    "scattered": (lambda p, x: written(x, torch.arange(3), p.w), (3, 3)),
    "one for each": (lambda p, x: written(x, x > 1.3, p.w), (4,)),
    "into a part": (lambda p, x: written((x * 1.0)[1:], 0, p.w, copy=False), (3,)),
    "scaled table": (lambda p, x: torch.add(x, p.w, alpha=0.5), (5, 3)),
    # Linear, but hardly anybody trains with them.
    "divided": (lambda p, x: p.w / x, (3,)),
    "difference": (lambda p, x: x - p.w, (3,)),
    "where": (lambda p, x: torch.where(x > 0, p.w, x), (3,)),
    "where, rows": (lambda p, x: torch.where(x[:, :1] > 0, p.w, x), (3,)),
    "second index": (lambda p, x: p.w[:, torch.tensor([0, 2, 2])] * 1, (4, 5)),
    "tensordot": (lambda p, x: torch.tensordot(p.w, x, ([-1, 0], [1, 0])), (5, 4, 3)),
    "summed data": (lambda p, x: torch.einsum("sd,de->e", x, p.w), (3, 4)),
    "two factors": (lambda p, x: torch.einsum("bi,bj,oij->bo", x, x, p.w), (2, 3, 3)),
    "namesake": (
        lambda p, x: torch.batch_norm(x, p.w, None, None, None, True, 0.1, 1e-5, False),
        (3,),
    ),
}


@pytest.mark.parametrize("name", NOT_LINEAR)
def test_what_has_no_rule_is_measured_with_its_module(name: str) -> None:
    call, shape = NOT_LINEAR[name]
    x = torch.linspace(-1.0, 2.0, 15).double().reshape(5, 3)
    (report,) = trained(Caller(call, {"w": shape}), lambda model: loss_of(model(x)))
    assert [reading.kind for reading in report.layers.values()] == ["module"]


@pytest.mark.slow(one_in=13)
@pytest.mark.parametrize("name", CASES)
def test_half_precision(name: str) -> None:
    """Rows of a half-precision function are float32; readings agree up to rounding."""
    case = CASES[name]
    found = []
    for dtype in (torch.float64, torch.bfloat16):
        model = case.model().to(dtype)
        inputs = [x.to(dtype) if x.is_floating_point() else x for x in case.data()]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        loss = lambda model, x=inputs: loss_of(model(*x))  # noqa: E731
        found.append(trained(model, loss, optimizer=optimizer, max_rows=None)[0].layers)
    full, half = found
    assert full.keys() == half.keys()
    for path, reading in half.items():
        for measure in ("gradient_cosine", "diagonal_cosine", "scale_mean", "common_share"):
            expected, value = (getattr(r, measure) for r in (full[path], reading))
            assert (value is None) == (expected is None)
            if value is not None:
                close = pytest.approx(expected, rel=0.15, abs=0.15, nan_ok=True)
                assert value == close, f"{measure} of {name}"


@pytest.mark.parametrize("function", [torch._grouped_mm, functional.grouped_mm])
def test_grouped_products_of_torch_itself(function: Callable[..., Tensor]) -> None:
    """torch's `grouped_mm` is measured in bfloat16; rows behind the last expert's are undefined."""
    ends = torch.tensor([3, 3, 10], dtype=torch.int32)

    def grouped(p: Any, x: Tensor) -> Tensor:
        return function(x, p.w.mT, offs=ends)[:10]

    def one_by_one(p: Any, x: Tensor) -> Tensor:
        return grouped_mm(x, p.w.mT, ends)[:10]

    readings = []
    for call in (grouped, one_by_one):
        torch.manual_seed(0)
        model = Caller(call, {"w": (3, 8, 16)}).bfloat16()
        x = torch.randn(12, 16, dtype=torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        (report,) = trained(model, lambda model, x=x: loss_of(model(x)), optimizer=optimizer)
        assert report.coverage == 1.0
        readings.append(report.layers["w"])
    assert readings[0].kind == "experts"
    assert readings[0].idle_share == pytest.approx(1 / 6)
    for measure, value in readings[0].measures().items():
        if value is not None:
            expected = getattr(readings[1], measure)
            assert value == pytest.approx(expected, rel=0.02, abs=0.01), measure
