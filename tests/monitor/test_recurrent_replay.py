"""Replayed recurrent layers: rows and gradients add up to the gradients of torch's own backward."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.overrides import TorchFunctionMode

from adiv_monitor.features.recurrent import (
    RECURRENT,
    Map,
    RecurrentCall,
    Returned,
    read_call,
    unroll,
)
from adiv_monitor.rerun.randomness import Randomness

K, H, P, B, T = 3, 4, 2, 3, 5
LENGTHS = torch.tensor([3, 5, 1])  # not sorted; one sample has a single time step
KINDS: dict[str, Callable[..., nn.RNNBase]] = {
    "tanh": lambda **kw: nn.RNN(K, H, **kw),
    "relu": lambda **kw: nn.RNN(K, H, nonlinearity="relu", **kw),
    "lstm": lambda **kw: nn.LSTM(K, H, **kw),
    "projected-lstm": lambda **kw: nn.LSTM(K, H, proj_size=P, **kw),
    "gru": lambda **kw: nn.GRU(K, H, **kw),
}
LAYOUTS = ("time-first", "batch-first", "unbatched", "packed", "packed-unsorted")
F64 = torch.float64
ROUNDING = {F64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 3e-2}

# A warning of torch's, issued once, about float32 on a CPU.
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")


class Unrolled(NamedTuple):
    """What `unroll` returns."""

    maps: list[Map]
    error: Tensor


@dataclass
class Seen:
    """A call, its outputs, and its replay once their gradients have arrived."""

    call: RecurrentCall
    returned: Returned
    replay: Unrolled | None = None


class Replays(TorchFunctionMode):
    """A mode that records every recurrent call, and replays it in a hook of the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Seen] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function not in RECURRENT:
            return function(*args, **(kwargs or {}))
        call = read_call(function, args, kwargs or {})
        state = Randomness([torch.device("cpu")]) if call.draws else None
        result = function(*args, **(kwargs or {}))
        seen = Seen(call, Returned.of(call, result))
        self.seen.append(seen)

        def found(gradients: Sequence[Tensor | None]) -> None:
            seen.replay = Unrolled(*unroll(seen.call, seen.returned, gradients, state))

        outputs = result if isinstance(result, tuple) else (result,)
        torch.autograd.graph.register_multi_grad_hook(outputs, found)
        return result


def flat(result: Any) -> Iterator[Tensor]:
    """Yield all float tensors in the output of a recurrent module."""
    if isinstance(result, PackedSequence):
        yield result.data
    elif isinstance(result, Tensor):
        yield result
    else:
        for part in result:
            yield from flat(part)


def loss_of(result: Any, used: Sequence[int] | None = None) -> Tensor:
    """Return a loss that weights every entry of the outputs differently."""
    parts = list(flat(result))
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(p.shape, generator=generator, dtype=F64).to(p.dtype) for p in parts]
    terms = [(p * w).sum() + (p * p * w).sum() for p, w in zip(parts, weights, strict=True)]
    return sum((terms[i] for i in (range(len(terms)) if used is None else used)), torch.zeros(()))


def given(layout: str, dtype: torch.dtype = F64) -> Tensor | PackedSequence:
    if layout == "unbatched":
        return torch.randn(T, K, dtype=dtype)
    if layout == "time-first":
        return torch.randn(T, B, K, dtype=dtype)
    x = torch.randn(B, T, K, dtype=dtype)
    if layout == "batch-first":
        return x
    lengths = LENGTHS if layout == "packed-unsorted" else LENGTHS.sort(descending=True).values
    return pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=layout == "packed")


def initial(rnn: nn.RNNBase, layout: str) -> Any:
    each = rnn.num_layers * (2 if rnn.bidirectional else 1)
    batch = () if layout == "unbatched" else (B,)
    h = torch.randn(each, *batch, rnn.proj_size or H, dtype=F64)
    return (h, torch.randn(each, *batch, H, dtype=F64)) if isinstance(rnn, nn.LSTM) else h


def replayed(module: nn.Module, *inputs: Any, used: Sequence[int] | None = None) -> Unrolled:
    with Replays() as replays:
        result = module(*inputs)
    torch.rand(1)  # other draws between forward and backward
    loss_of(result, used).backward()
    (seen,) = replays.seen
    assert seen.replay is not None
    return seen.replay


def assert_adds_up(module: nn.Module, found: Unrolled, tolerance: float = 1e-9) -> None:
    """Assert that every parameter's gradient is Gᵀ Φ of one map, with each parameter in one map."""
    parameters = dict(module.named_parameters())
    part = {"input": "ih", "hidden": "hh", "projection": "hr"}
    for linear in found.maps:
        kind, _, suffix = linear.use.part.partition("_")
        suffix = f"_{suffix}" if suffix else ""
        weight = parameters.pop(f"weight_{part[kind]}{suffix}")
        bias = parameters.pop(f"bias_{part[kind]}{suffix}", None)
        assert linear.use.weight is weight
        assert linear.use.bias is bias
        for tensor in (linear.inputs, linear.z, linear.gradient):
            assert not tensor.requires_grad
        assert_near(linear.gradient.T @ linear.inputs, weight.grad, tolerance)
        assert_near(linear.z, nn.functional.linear(linear.inputs, weight, bias), tolerance)
        if bias is not None:
            assert_near(linear.gradient.sum(0), bias.grad, tolerance)
    assert not parameters


def assert_near(ours: Tensor, theirs: Tensor | None, tolerance: float) -> None:
    assert theirs is not None
    theirs = theirs.detach()
    torch.testing.assert_close(
        ours, theirs, rtol=0, atol=tolerance * max(1.0, theirs.abs().max().item())
    )


@pytest.mark.slow(one_in=4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_add_up_to_torchs_own(kind: str, layers: int, layout: str) -> None:
    for bidirectional, bias, with_states in product((False, True), repeat=3):
        rnn = KINDS[kind](
            num_layers=layers,
            bidirectional=bidirectional,
            bias=bias,
            batch_first=layout == "batch-first",
            dtype=F64,
        )
        inputs = (given(layout), *([initial(rnn, layout)] if with_states else []))
        found = replayed(rnn, *inputs)
        assert found.error < 1e-14
        assert_adds_up(rnn, found)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ROUNDING)
def test_dropouts_masks_repeat(kind: str, layout: str, dtype: torch.dtype) -> None:
    rnn = KINDS[kind](
        num_layers=3,
        bidirectional=True,
        dropout=0.5,
        batch_first=layout == "batch-first",
        dtype=dtype,
    )
    x = given(layout, dtype)
    before = torch.get_rng_state()
    rnn(x)
    torch.rand(1)
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    found = replayed(rnn, x)
    assert torch.equal(torch.get_rng_state(), after)  # as without a replay
    assert not torch.equal(before, after)
    assert found.error < ROUNDING[dtype]
    if dtype != torch.bfloat16:  # bfloat16's own gradients are less precise
        assert_adds_up(rnn, found, 1e-9 if dtype == F64 else 1e-5)


def test_other_masks_are_noticed() -> None:
    rnn = nn.LSTM(K, H, 2, dropout=0.5, dtype=F64)
    with Replays() as replays:
        rnn(given("time-first"))
    (seen,) = replays.seen
    _, error = unroll(seen.call, seen.returned, [None] * 3, Randomness([torch.device("cpu")]))
    assert error > 1e-2


@pytest.mark.parametrize("train", [False, True])
def test_no_masks_in_evaluation_or_of_one_layer(train: bool) -> None:
    rnn = nn.GRU(K, H, 1 if train else 2, dropout=0.0 if train else 0.5, dtype=F64).train(train)
    with Replays() as replays:
        rnn(given("time-first"))
    assert not replays.seen[0].call.draws
    one_layer = read_call(
        torch.gru,
        (torch.zeros(T, B, K), torch.zeros(1, B, H), [torch.zeros(1)] * 4, True, 1, 0.5, True),
        {"bidirectional": False, "batch_first": False},
    )
    assert not one_layer.draws


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 2)])
@pytest.mark.parametrize("kind", ["lstm", "projected-lstm"])
def test_outputs_that_the_loss_leaves_out(kind: str, used: tuple[int, ...]) -> None:
    rnn = KINDS[kind](num_layers=2, bidirectional=True, dtype=F64)
    assert_adds_up(rnn, replayed(rnn, given("packed"), used=used))


def test_no_gradient_at_all_is_zero() -> None:
    with Replays() as replays:
        nn.LSTM(K, H, proj_size=P)(given("time-first", torch.float32))
    (seen,) = replays.seen
    maps, _ = unroll(seen.call, seen.returned, [None, None, None])
    for linear in maps:
        assert linear.gradient.shape == linear.z.shape
        assert not linear.gradient.any()


# Single rows against a reference that runs one sample after the other.


class Probed:
    """torch's own cell, for one sample and time step after the other, with separate biases per use.

    The gradient of such a bias is ∂L/∂z of this one use.
    """

    def __init__(self, rnn: nn.RNNBase) -> None:
        self.rnn = rnn
        self.cell: Callable[..., Any] = {
            nn.LSTM: torch.lstm_cell,
            nn.GRU: torch.gru_cell,
            nn.RNN: torch.rnn_tanh_cell,
        }[type(rnn)]
        self.used: dict[str, dict[tuple[int, int], tuple[Tensor, Tensor]]] = {}

    def use(self, name: str, time: int, sample: int, x: Tensor, n: int) -> Tensor:
        probe = torch.zeros(n, dtype=F64, requires_grad=True)
        self.used.setdefault(name, {})[time, sample] = (x.detach()[0], probe)
        return probe

    def run(self, sample: int, x: Tensor, state: list[list[Tensor]]) -> tuple[Tensor, list[Any]]:
        """Return the outputs (T, ·) of a sample (T, K), and the last states, given every cell's."""
        ends = []
        directions = 2 if self.rnn.bidirectional else 1
        for layer in range(self.rnn.num_layers):
            sides = []
            for reverse in range(directions):
                suffix = f"_l{layer}" + "_reverse" * reverse
                now = [s[None] for s in state[layer * directions + reverse]]
                outputs = {}
                for t in reversed(range(len(x))) if reverse else range(len(x)):
                    now = self.step(suffix, t, sample, x[t][None], now)
                    outputs[t] = now[0][0]
                sides.append(torch.stack([outputs[t] for t in range(len(x))]))
                ends.append([s[0] for s in now])
            x = torch.cat(sides, -1)
        return x, ends

    def step(self, suffix: str, t: int, sample: int, x: Tensor, state: list[Tensor]) -> list[Any]:
        w_ih, w_hh, b_ih, b_hh = (
            getattr(self.rnn, f"{name}{suffix}")
            for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        probe_ih = self.use(f"input{suffix}", t, sample, x, len(b_ih))
        probe_hh = self.use(f"hidden{suffix}", t, sample, state[0], len(b_hh))
        biases = (b_ih + probe_ih, b_hh + probe_hh)
        if len(state) == 1:
            return [self.cell(x, state[0], w_ih, w_hh, *biases)]
        if not self.rnn.proj_size:
            return list(torch.lstm_cell(x, state, w_ih, w_hh, *biases))
        # A cell without a projection needs an h as wide as c, so the bias contains the part from h.
        from_h = (state[0] @ w_hh.T)[0]
        no_h = torch.zeros_like(state[1])
        h, c = torch.lstm_cell(
            x, (no_h, state[1]), w_ih, w_hh.new_zeros(4 * H, H), biases[0], biases[1] + from_h
        )
        probe = self.use(f"projection{suffix}", t, sample, h, P)
        return [h @ getattr(self.rnn, f"weight_hr{suffix}").T + probe, c]


@pytest.mark.parametrize("kind", ["tanh", "lstm", "projected-lstm", "gru"])
def test_every_row_is_what_a_single_sample_says(kind: str) -> None:
    """With packed input, rows are exactly the existing ones, by time step, then by sample."""
    rnn = KINDS[kind](num_layers=2, bidirectional=True, dtype=F64)
    lengths = LENGTHS.sort(descending=True).values
    x = torch.randn(B, T, K, dtype=F64)
    states = initial(rnn, "packed")
    each = list(states) if isinstance(states, tuple) else [states]
    found = replayed(rnn, pack_padded_sequence(x, lengths, batch_first=True), states)

    probed = Probed(rnn)
    runs = [
        probed.run(b, x[b, : lengths[b]], [[s[k, b] for s in each] for k in range(len(each[0]))])
        for b in range(B)
    ]
    rows = [(t, b) for t in range(T) for b in range(B) if t < lengths[b]]
    output = torch.stack([runs[b][0][t] for t, b in rows])
    ends = [
        torch.stack([torch.stack([end[i] for end in runs[b][1]]) for b in range(B)], 1)
        for i in range(len(each))
    ]
    loss_of((output, *ends)).backward()

    assert {linear.use.part for linear in found.maps} == set(probed.used)
    for linear in found.maps:
        truth = probed.used[linear.use.part]
        inputs = torch.stack([truth[row][0] for row in rows])
        gradient = torch.stack([truth[row][1].grad for row in rows])
        assert_near(linear.inputs, inputs, 1e-12)
        assert_near(linear.gradient, gradient, 1e-12)


# Cells, precision, frozen parameters, and the unaffected run.


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("batch", [(B,), ()])
@pytest.mark.parametrize(
    "cell",
    [
        lambda **kw: nn.RNNCell(K, H, **kw),
        lambda **kw: nn.RNNCell(K, H, nonlinearity="relu", **kw),
        lambda **kw: nn.LSTMCell(K, H, **kw),
        lambda **kw: nn.GRUCell(K, H, **kw),
    ],
    ids=["tanh", "relu", "lstm", "gru"],
)
def test_cells(cell: Callable[..., nn.Module], batch: tuple[int, ...], bias: bool) -> None:
    module = cell(bias=bias, dtype=F64)
    h = torch.randn(*batch, H, dtype=F64)
    state = (h, torch.randn(*batch, H, dtype=F64)) if isinstance(module, nn.LSTMCell) else h
    found = replayed(module, torch.randn(*batch, K, dtype=F64), state)
    assert [linear.use.part for linear in found.maps] == ["input", "hidden"]
    assert found.error < 1e-14
    assert_adds_up(module, found)


class OneKernel(torch.autograd.Function):
    """An LSTM cell that returns h and c from one node of the graph, as on a GPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, h: Tensor, c: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, h, c, *weights)
        return torch.lstm_cell(x, (h, c), *weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            outputs = torch.lstm_cell(leaves[0], (leaves[1], leaves[2]), *leaves[3:])
        return torch.autograd.grad(outputs, leaves, gradients)


def test_an_lstm_cell_of_one_kernel() -> None:
    """If h does not depend on the returned c, c's gradient contains no part from h."""
    cell = nn.LSTMCell(K, H, dtype=F64)
    x, h, c = (torch.randn(B, n, dtype=F64) for n in (K, H, H))
    weights = (cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh)
    outputs = OneKernel.apply(x, h, c, *weights)
    gradients: list[Tensor | None] = []
    torch.autograd.graph.register_multi_grad_hook(outputs, gradients.extend)
    loss_of(outputs).backward()
    call = read_call(torch.lstm_cell, (x, (h, c), *weights), {})
    assert_adds_up(cell, Unrolled(*unroll(call, Returned.of(call, outputs), gradients)))


def test_a_cell_in_a_loop_adds_up_over_its_calls() -> None:
    cell = nn.LSTMCell(K, H, dtype=F64)
    x = torch.randn(T, B, K, dtype=F64)
    with Replays() as replays:
        state = (torch.zeros(B, H, dtype=F64), torch.zeros(B, H, dtype=F64))
        for t in range(T):
            state = cell(x[t], state)
    loss_of(state).backward()
    for k, weight in enumerate((cell.weight_ih, cell.weight_hh)):
        maps = [seen.replay.maps[k] for seen in replays.seen if seen.replay is not None]
        assert len(maps) == T
        assert_near(sum(m.gradient.T @ m.inputs for m in maps), weight.grad, 1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_single_precision_and_inputs_with_gradients(kind: str, requires_grad: bool) -> None:
    rnn = KINDS[kind](num_layers=2, bidirectional=True)
    x = torch.randn(T, B, K, requires_grad=requires_grad)
    found = replayed(rnn, x)
    assert found.error < 1e-6
    assert_adds_up(rnn, found, 1e-5)
    assert {linear.gradient.dtype for linear in found.maps} == {torch.float32}


@pytest.mark.usefixtures("without_onednn")
@pytest.mark.parametrize("kind", ["tanh", "lstm", "gru"])
def test_autocast_is_replayed_in_single_precision(kind: str) -> None:
    rnn = KINDS[kind](num_layers=2, dropout=0.5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = replayed(rnn, torch.randn(T, B, K))
        assert torch.is_autocast_enabled("cpu")
    assert found.error < 1e-2
    assert {linear.gradient.dtype for linear in found.maps} == {torch.float32}
    assert_adds_up(rnn, found, 3e-2)


def test_frozen_weights_have_rows_too() -> None:
    rnn = nn.GRU(K, H, 2, dtype=F64)
    rnn.weight_ih_l0.requires_grad_(False)
    twin = copy.deepcopy(rnn).requires_grad_(True)
    x = given("time-first")
    found = replayed(rnn, x)
    replayed(twin, x)
    assert rnn.weight_ih_l0.grad is None
    assert_near(found.maps[0].gradient.T @ found.maps[0].inputs, twin.weight_ih_l0.grad, 1e-9)


def test_the_run_is_bit_identical() -> None:
    rnn = nn.LSTM(K, H, 2, bidirectional=True, dropout=0.3)
    twin = copy.deepcopy(rnn)
    x = torch.randn(T, B, K)
    ends = []
    for module, watched in ((rnn, True), (twin, False)):
        torch.manual_seed(7)
        entered = x.clone().requires_grad_()
        if watched:
            replayed(module, entered)
        else:
            result = module(entered)
            torch.rand(1)
            loss_of(result).backward()
        ends.append([entered.grad, torch.rand(3), *(p.grad for p in module.parameters())])
    for ours, theirs in zip(*ends, strict=True):
        assert torch.equal(ours, theirs)


def test_keywords_are_read_as_positions_are() -> None:
    x, h = torch.randn(T, B, K), torch.zeros(1, B, H)
    params = [torch.randn(3 * H, K), torch.randn(3 * H, H)]
    options = {
        "has_biases": False,
        "num_layers": 1,
        "dropout": 0.0,
        "train": True,
        "bidirectional": False,
    }
    padded = read_call(
        torch.gru, (), {"input": x, "hx": h, "params": params, **options, "batch_first": True}
    )
    assert (padded.layout, padded.batch_sizes) == ("batch first", (T,) * B)
    sizes = torch.tensor([3, 2])
    packed = read_call(
        torch.gru,
        (),
        {"data": x[0], "batch_sizes": sizes, "hx": h, "params": params, **options},
    )
    assert (packed.layout, packed.batch_sizes) == ("packed", (3, 2))
    assert packed.maps[0][1].weight is params[1]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_masks_drawn_by_cudnn_are_refused(dropout: float) -> None:
    """A tensor that claims to be on a GPU, where cuDNN would run the call, is rejected."""
    with FakeTensorMode():
        x = torch.empty(T, B, K, device="cuda")
        h = torch.empty(2, B, H, device="cuda")
    call = read_call(
        torch.gru, (x, h, [torch.zeros(1)] * 8, True, 2, dropout, True, False, False), {}
    )
    if dropout == 0:
        assert call.refusal is None
        return
    assert call.refusal is not None
    assert "cuDNN" in call.refusal
