"""The monitor's kernels against plain PyTorch, one by one and in a measured step."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from adiv_layers.kernels import launch
from fused_runs import alike, trained
from interpreted import far_apart, plain, relative_error
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from adiv_monitor.features.features import DenseFeatures
from adiv_monitor.features.rows import Rows
from adiv_monitor.features.whole import squares, squares_and_sum
from adiv_monitor.kernels import looks, moments, products, steps, totals
from adiv_monitor.kernels.choice import attempt
from adiv_monitor.maths import dots
from adiv_monitor.maths.records import leaves
from adiv_monitor.maths.sums import Vector, column_of, pairs_of
from adiv_monitor.maths.totals import _of_stacked
from adiv_monitor.step.row_vectors import RowVectors, _fused, _plain

FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = [FLOAT32, BFLOAT16, FLOAT16]
Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def _poison(monkeypatch: Patch) -> None:
    """Fill new memory with NaN, so that entries a kernel does not write read NaN."""
    torch.manual_seed(0)
    made = Tensor.new_empty

    def new_empty(tensor: Tensor, *size: Any, **options: Any) -> Tensor:
        new = made(tensor, *size, **options)
        return new.fill_(math.nan) if new.is_floating_point() else new

    monkeypatch.setattr(Tensor, "new_empty", new_empty)


def close(found: Tensor | None, expected: Tensor | None, tolerance: float = 1e-6) -> None:
    assert found is not None and expected is not None
    assert found.shape == expected.shape
    assert relative_error(found, expected) <= tolerance


def images(*shape: int) -> Tensor:
    return torch.randn(shape).movedim(1, -1)


LOOKED: dict[str, Callable[[], Tensor]] = {
    "one row": lambda: torch.randn(1, 5),
    "no rows' dimension": lambda: torch.randn(9),
    "odd": lambda: torch.randn(37, 33),
    "many": lambda: torch.randn(300, 3),
    "wide": lambda: torch.randn(3, 2500),
    "tokens": lambda: torch.randn(4, 7, 20),
    "a slice": lambda: torch.randn(6, 5, 40)[:, 1:4, 3:30],
    "channels first": lambda: images(3, 5, 7, 6),
    "channels first, many": lambda: images(2, 33, 150),
    "channels last": lambda: (
        torch.randn(3, 5, 7, 6).to(memory_format=torch.channels_last).movedim(1, -1)
    ),
    "expanded": lambda: torch.randn(1, 6).expand(4, 6),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", LOOKED)
def test_look(case: str, dtype: torch.dtype) -> None:
    x = LOOKED[case]().to(dtype)
    rows = x.double().reshape(-1, x.shape[-1])
    chosen = torch.arange(0, len(rows), max(1, len(rows) // 5))
    found = attempt(
        "look", x, chosen=chosen, rows=len(chosen), squares=True, sums=len(rows) % 2 == 1
    )
    close(found[0], rows.square().sum(1))
    close(found[2], rows[chosen], 0.0)
    if len(rows) % 2:
        close(found[1], rows.sum(0), 2e-6)
    nothing, none, every = attempt("look", x, rows=len(rows))
    assert nothing is none is None
    close(every, rows, 0.0)


def test_rows_of_another_tensor_are_not_read() -> None:
    """Row indices beyond the tensor raise as in plain PyTorch; a kernel would read other memory."""
    for chosen in (None, np.array([0, 30])):
        with pytest.raises((RuntimeError, IndexError)):
            Rows((6, 7), chosen).take(torch.randn(1, 7, 5))


def test_negated_memory_is_plain() -> None:
    x = torch.randn(4, 3, dtype=torch.complex64).conj().imag
    assert x.is_neg()
    assert attempt("look", x, squares=True) is None


def test_none_of_the_rows() -> None:
    x = torch.randn(6, 5)
    close(Rows((6,), np.arange(0)).take(x), x[:0])
    squares, _, none = attempt("look", x, chosen=torch.arange(0), rows=0, squares=True)
    close(squares, x.square().sum(1))
    close(none, x[:0])


def test_a_look_at_what_lies_in_no_even_steps_is_plain() -> None:
    x = torch.randn(4, 5, 6, 7)[:, ::2, 1:4].transpose(0, 1).movedim(-1, -1)
    assert attempt("look", x.transpose(0, 2), squares=True) is None
    close(squares(x.transpose(0, 2)), x.transpose(0, 2).square().sum(-1))


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_squares(dim: int) -> None:
    x = torch.randn(4, 5, 6)
    close(squares(x, dim), x.square().sum(dim))
    of_rows, total = squares_and_sum(x[0])
    close(of_rows, x[0].square().sum(1))
    close(total, x[0].sum(0))


@pytest.mark.parametrize("x", [torch.randn(0, 4), torch.randn(3, 4).double(), torch.randn(3, 0)])
def test_what_is_empty_or_double_is_plain(x: Tensor) -> None:
    assert attempt("look", x, squares=True) is None
    close(squares(x), x.square().sum(-1))
    assert dots.norms_of([x])[0].dtype == x.dtype


def test_norms_of_several_tensors() -> None:
    tensors = [torch.randn(3, 4), torch.randn(50).bfloat16(), torch.randn(2, 3, 4)]
    for found, tensor in zip(dots.norms_of(tensors), tensors, strict=True):
        close(found, tensor.double().norm().reshape(1))


def test_rows_are_taken_as_they_are(monkeypatch: Patch) -> None:
    for x in (torch.randn(5, 4, 3), torch.randn(5, 3, 4).mT, torch.randn(5, 4, 3).half()):
        for chosen in (None, torch.tensor([0, 7, 19]).numpy()):
            rows = Rows((5, 4), chosen)
            found = rows.take(x)
            with plain():
                assert torch.equal(found, rows.take(x))


@pytest.mark.slow(one_in=7)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(9, 5), (3, 5, 70), (4, 33, 6, 5), (1, 1, 2), (2, 3, 2, 2, 3)])
@pytest.mark.parametrize("last", [False, True])
def test_normalised_rows(shape: tuple[int, ...], dtype: torch.dtype, last: bool) -> None:
    x = (3 * torch.randn(shape) + 40).to(dtype).movedim(1, -1)
    x = x.contiguous() if last else x
    rows = x.double().reshape(-1, x.shape[-1])
    variance, mean = torch.var_mean(rows, 0, correction=0)
    expected = (rows - mean) / (variance + 1e-3).sqrt()
    found = attempt("normalised_rows", x, chosen=None, rows=len(rows), eps=1e-3)
    close(found, expected, 2e-5)
    chosen = torch.tensor([0, len(rows) - 1])
    close(attempt("normalised_rows", x, chosen=chosen, rows=2, eps=1e-3), found[chosen], 0.0)


def test_a_first_entry_far_from_the_mean() -> None:
    """A first entry far from the mean loses no precision: the batch's own mean is the pivot."""
    x = torch.randn(512, 3)
    x[0] = 1e4
    variance, mean = torch.var_mean(x.double(), 0, correction=0)
    expected = (x.double() - mean) / (variance + 1e-5).sqrt()
    found = attempt("normalised_rows", x, mean.float(), chosen=None, rows=512, eps=1e-5)
    close(found, expected, 2e-6)


@pytest.mark.slow
def test_moments_of_many_parts(monkeypatch: Patch) -> None:
    """Moments of more parts than are added at once are exact and reproducible."""
    monkeypatch.setattr(launch, "_multiprocessors", lambda _: 50)
    monkeypatch.setattr(moments, "_TILE", 32)
    x = 3 * torch.randn(1700, 3) + 40
    variance, mean = torch.var_mean(x.double(), 0, correction=0)
    expected = (x.double() - mean) / (variance + 1e-3).sqrt()
    found = attempt("normalised_rows", x, chosen=None, rows=1700, eps=1e-3)
    close(found, expected, 2e-5)
    assert torch.equal(found, attempt("normalised_rows", x, chosen=None, rows=1700, eps=1e-3))


@pytest.mark.parametrize("strides", [(2**31, 4, 1), (2**32, 1, 3), (0, 2**31, 1), (0, 1, 2**30)])
def test_what_lies_far_apart(strides: tuple[int, ...]) -> None:
    """Images, positions and channels beyond 32-bit offsets are read correctly."""
    near = torch.randn(1 if strides[0] == 0 else 2, 3, 4).to(BFLOAT16)
    x, rows = far_apart(near, strides), near.double().reshape(-1, 4)
    squares, sums, taken = attempt("look", x, rows=len(rows), squares=True, sums=True)
    close(squares, rows.square().sum(1))
    close(sums, rows.sum(0))
    close(taken, rows, 0.0)
    variance, mean = torch.var_mean(rows, 0, correction=0)
    found = attempt("normalised_rows", x, chosen=None, rows=len(rows), eps=1e-3)
    close(found, (rows - mean) / (variance + 1e-3).sqrt(), 2e-5)


# (rows, groups, features of a group, outputs of a group)
ROWS = {
    "linear": (5, 1, 33, 20),
    "one row": (1, 1, 3, 1),
    "wide": (3, 1, 700, 600),
    "gain": (17, 12, 1, 1),
    "wide gain": (2, 300, 1, 1),
    "depthwise": (6, 9, 9, 1),
    "groups": (7, 4, 10, 5),
}


@pytest.mark.slow(one_in=3)
@pytest.mark.parametrize("case", ROWS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("stepped", [False, True])
def test_row_products(case: str, bias: bool, stepped: bool) -> None:
    count, groups, patch, outputs = ROWS[case]
    width = groups * outputs
    features = DenseFeatures(torch.randn(count, groups, patch), 1.0 if bias else None)

    def change() -> tuple[Tensor, Tensor | None]:
        return torch.randn(count, width), torch.randn(width).expand(count, -1) if bias else None

    z = torch.randn(width, count).t()  # in the other memory order
    factor = torch.tensor(0.7) if stepped else None
    rows = RowVectors(torch.randn(count, width), factor, z, change(), change() if stepped else None)
    found, expected = _fused(rows, features), _plain(rows, features)
    assert found is not None and found.vectors == expected.vectors
    close(found.products, expected.products, 2e-6)
    assert (found.of_groups is None) == (expected.of_groups is None) == (groups == 1)
    if found.of_groups is not None and expected.of_groups is not None:
        for value, other in zip(found.of_groups, expected.of_groups, strict=True):
            close(value, other, 2e-6)
    close(found.scale, expected.scale)
    close(found.weight_norms, features.weight_norms())


def test_a_small_rest_is_not_lost() -> None:
    """A small difference of nearly equal vectors is squared after the subtraction."""
    phi = torch.randn(4, 1, 30)
    G = torch.randn(4, 50)
    e = phi.square().sum(2) * G + 1e-3 * torch.randn(4, 50)
    rows = RowVectors(G, None, torch.randn(4, 50), (e, None))
    found, expected = _fused(rows, DenseFeatures(phi)), _plain(rows, DenseFeatures(phi))
    assert found is not None
    at = column_of(pairs_of(found.vectors), Vector.REST, Vector.REST)
    close(found.products[:, at], expected.products[:, at], 1e-3)


def test_nan_stays_in_its_row() -> None:
    phi = torch.randn(4, 6, 1)
    phi[2, 3] = math.nan
    rows = RowVectors(*(torch.randn(4, 6), None, torch.randn(4, 6)), (torch.randn(4, 6), None))
    found, expected = _fused(rows, DenseFeatures(phi)), _plain(rows, DenseFeatures(phi))
    assert found is not None and found.of_groups is not None and expected.of_groups is not None
    for value, other in zip(
        (found.products, *found.of_groups), (expected.products, *expected.of_groups), strict=True
    ):
        torch.testing.assert_close(value, other, equal_nan=True)


def test_what_is_not_plain_is_not_fused() -> None:
    given = [torch.randn(3, 4) for _ in range(3)]
    rows = RowVectors(given[0], None, given[1], (given[2], None))
    phi, column = torch.randn(3, 1, 4), torch.ones(3, 1)
    assert _fused(rows, DenseFeatures(phi)) is not None
    assert _fused(rows, DenseFeatures(phi, column)) is None
    assert _fused(rows, DenseFeatures(phi, weight_gain=column)) is None
    assert _fused(rows, DenseFeatures(phi, mixes_rows=True)) is None
    assert _fused(rows, DenseFeatures(None, column)) is None
    rows.d = None, given[2]
    assert _fused(rows, DenseFeatures(phi)) is None


@pytest.mark.filterwarnings("ignore:invalid value encountered in divide")  # no row with a gradient
@pytest.mark.parametrize("count", [1, 37, 5000])
@pytest.mark.parametrize("bias", [0.0, 1.0, "of rows"])
def test_totals(count: int, bias: float | str) -> None:
    weight, square = torch.rand(3, count), torch.rand(3, count)
    square[:, ::3] = 0
    square[0, 0] = 1
    several = torch.rand(3, count) if isinstance(bias, str) else bias
    found = _of_stacked(weight, several, square)
    with plain():
        expected = _of_stacked(weight, several, square)
    for (name, value), (other, told) in zip(leaves(expected), leaves(found), strict=True):
        assert name == other and told.dtype == value.dtype
        torch.testing.assert_close(told, value, equal_nan=True)


def test_totals_of_very_many_rows_are_plain() -> None:
    """Plain PyTorch sums very many rows: a kernel would read them all with one program."""
    for rows, fused in ((2**15, True), (2**15 + 1, False)):
        square = torch.rand(2, rows)
        assert (attempt("totals", square, square, None, bias=1.0) is not None) is fused


def test_scales_that_are_all_the_same_have_no_spread() -> None:
    found = _of_stacked(torch.full((1, 300), 0.3), 1.0, torch.rand(1, 300) + 1)
    assert found.scales is not None and found.scales.deviation.item() == 0
    found = _of_stacked(torch.tensor([[1.0, math.nan]]), 0.0, torch.ones(1, 2))
    assert found.scales is not None and found.scales.largest.isnan()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("shape", [(9, 5, 3, 3), (40, 17, 5, 5)])
def test_step_products(shape: tuple[int, ...], dtype: torch.dtype, last: bool) -> None:
    form = torch.channels_last if last else torch.contiguous_format
    before, now, gamma = (torch.randn(shape).to(dtype).to(memory_format=form) for _ in range(3))
    expected = before.double() - now.double()
    product = (expected * gamma.double()).sum()
    taken, norms, parts = attempt("step_products", before, now, gamma)
    assert taken.dtype == FLOAT32 and taken.stride() == now.stride()
    assert (taken.data_ptr() == before.data_ptr()) is (dtype == FLOAT32)
    close(taken, expected)
    close(torch.linalg.vector_norm(norms), expected.norm())
    assert abs(parts.sum() - product) <= 1e-5 * expected.norm() * gamma.double().norm()


def test_what_a_step_took_is_written_by_one_kernel_alone(monkeypatch: Patch) -> None:
    monkeypatch.setattr(steps, "run", lambda *_, **__: None)  # the interpreter's copies would count
    before, now = torch.randn(64).to(BFLOAT16), torch.randn(64).to(BFLOAT16)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        steps.step_products(before, now, now)
    assert "aten::_to_copy" not in {event.name for event in profiler.events()}


def test_what_lies_in_another_order_is_plain() -> None:
    a = torch.randn(4, 5, 3, 3)
    assert attempt("step_products", a, a.to(memory_format=torch.channels_last), a) is None
    assert attempt("step_products", a[:, ::2], a[:, ::2], a[:, ::2]) is None


@pytest.mark.slow(one_in=2)
@pytest.mark.parametrize("max_rows", [8, None])
def test_a_measured_step(max_rows: int | None, monkeypatch: Patch) -> None:
    started: set[str] = set()
    for room in (looks, moments, products, steps, totals):

        def run(kernel: Any, *arguments: Any, _run: Any = room.run, **options: Any) -> None:
            started.add(kernel.fn.__name__)
            _run(kernel, *arguments, **options)

        monkeypatch.setattr(room, "run", run)
    monkeypatch.setattr(products, "_TILE", 4096)  # for the interpreter
    monkeypatch.setattr(looks, "_TILE", 2**15)
    reports, net = trained(True, max_rows=max_rows)
    assert started == {
        *("look_kernel", "moments_kernel", "normalised_rows_kernel", "row_products_kernel"),
        *("step_products_kernel", "totals_kernel"),
    }
    started.clear()
    expected, other = trained(False, max_rows=max_rows)
    assert not started
    unmonitored = trained(False, monitored=False)[1]
    for a, b, c in zip(*(m.parameters() for m in (net, other, unmonitored)), strict=True):
        assert torch.equal(a, b) and torch.equal(b, c)
    assert len(reports) == len(expected) == 2
    for mine, theirs in zip(reports, expected, strict=True):
        assert mine.layers.keys() == theirs.layers.keys() and len(mine.layers) == 7
        assert mine.notes == theirs.notes
        for path, reading in mine.layers.items():
            for name, value in vars(reading).items():
                assert alike(value, vars(theirs.layers[path])[name]), (path, name)


@pytest.mark.filterwarnings("ignore:adiv_layers. .* does not start")
def test_kernels_that_do_not_start_change_nothing(monkeypatch: Patch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise launch.KernelError

    for room in (looks, moments, products, steps, totals):
        monkeypatch.setattr(room, "run", fails)
    found, expected = (trained(kernels, max_rows=8)[0] for kernels in (True, False))
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.layers.keys() == theirs.layers.keys()
        for path, reading in mine.layers.items():
            assert alike(vars(reading), vars(theirs.layers[path])), path
