"""Every reading of a recurrent layer equals that of linear layers computing the same by hand."""

import copy
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from cases import OPTIMIZERS
from setups import one_step, same, trained
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from adiv_monitor import StepReport

K, H, P, B, T = 3, 4, 2, 4, 5
F64 = torch.float64
KINDS: dict[str, Callable[..., nn.RNNBase]] = {
    "tanh": lambda **kw: nn.RNN(K, H, **kw),
    "relu": lambda **kw: nn.RNN(K, H, nonlinearity="relu", **kw),
    "lstm": lambda **kw: nn.LSTM(K, H, **kw),
    "projected-lstm": lambda **kw: nn.LSTM(K, H, proj_size=P, **kw),
    "gru": lambda **kw: nn.GRU(K, H, **kw),
}
# A warning of torch's, issued once, about float32 on a CPU.
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")


# The same networks of plain linear layers, named like the monitor's maps of the fused ones.


def cell_by_hand(kind: str, a: Tensor, b: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Compute a cell from its two maps' outputs, by the equations in torch's documentation."""
    if kind == "tanh":
        return ((a + b).tanh(),)
    if kind == "relu":
        return ((a + b).clamp(min=0),)
    if kind == "gru":
        r, z = ((a[:, k * H : (k + 1) * H] + b[:, k * H : (k + 1) * H]).sigmoid() for k in (0, 1))
        n = (a[:, 2 * H :] + r * b[:, 2 * H :]).tanh()
        return ((1 - z) * n + z * state[0],)
    i, f, g, o = ((a + b)[:, k * H : (k + 1) * H] for k in range(4))
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    found = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype)
    found.weight.data.copy_(weight.data)
    found.weight.requires_grad_(weight.requires_grad)
    if bias is not None:
        found.bias.data.copy_(bias.data)
        found.bias.requires_grad_(bias.requires_grad)
    return found


class ByHand(nn.Module):
    """A recurrent network of linear layers, called once per time step.

    Takes padded input (T, B, K), or packed input.
    """

    def __init__(self, kind: str, rnn: nn.RNNBase) -> None:
        super().__init__()
        self.kind = "lstm" if isinstance(rnn, nn.LSTM) else kind
        self.like = [rnn.num_layers, 2 if rnn.bidirectional else 1]
        for suffix in self.suffixes():
            for name, short in (("input", "ih"), ("hidden", "hh"), ("projection", "hr")):
                weight = getattr(rnn, f"weight_{short}{suffix}", None)
                if weight is not None:
                    bias = getattr(rnn, f"bias_{short}{suffix}", None)
                    self.add_module(name + suffix, linear(weight, bias))

    def suffixes(self) -> list[str]:
        layers, directions = self.like
        return [f"_l{k}{s}" for k in range(layers) for s in ("", "_reverse")[:directions]]

    def forward(self, x: Tensor | PackedSequence) -> tuple[Any, Any]:
        packed = isinstance(x, PackedSequence)
        sizes = x.batch_sizes.tolist() if packed else [x.shape[1]] * len(x)
        rows = list(x.data.split(sizes)) if packed else list(x)
        layers, directions = self.like
        ends: list[tuple[Tensor, ...]] = []
        for k in range(layers):
            sides = [
                self.side(suffix, rows, ends, backwards=suffix.endswith("reverse"))
                for suffix in self.suffixes()[k * directions : (k + 1) * directions]
            ]
            rows = [torch.cat(parts, 1) for parts in zip(*sides, strict=True)]
        last = [torch.stack(of_all) for of_all in zip(*ends, strict=True)]
        output = PackedSequence(torch.cat(rows), *x[1:]) if packed else torch.stack(rows)
        if packed and x.unsorted_indices is not None:
            last = [state[:, x.unsorted_indices] for state in last]
        return output, tuple(last) if self.kind == "lstm" else last[0]

    def side(
        self, suffix: str, rows: list[Tensor], ends: list[tuple[Tensor, ...]], *, backwards: bool
    ) -> list[Tensor]:
        enter, recur = self.get_submodule("input" + suffix), self.get_submodule("hidden" + suffix)
        narrow = self._modules.get("projection" + suffix)
        sizes = [recur.in_features, *([H] if self.kind == "lstm" else [])]
        widest = max(map(len, rows))
        state = tuple(rows[0].new_zeros(widest, n) for n in sizes)
        found: dict[int, Tensor] = {}
        for t in reversed(range(len(rows))) if backwards else range(len(rows)):
            n = len(rows[t])
            present = tuple(s[:n] for s in state)
            new = cell_by_hand(self.kind, enter(rows[t]), recur(present[0]), present)
            if narrow is not None:
                new = narrow(new[0]), new[1]
            found[t] = new[0]
            state = tuple(torch.cat([a, s[n:]]) for a, s in zip(new, state, strict=True))
        ends.append(state)
        return [found[t] for t in range(len(rows))]


class Net(nn.Module):
    """A recurrent network and a read-out; the loss depends on every output."""

    def __init__(self, rnn: nn.Module, width: int) -> None:
        super().__init__()
        self.rnn = rnn
        self.head = nn.Linear(width, 2, dtype=F64)
        self.in_place = False

    def forward(self, x: Any) -> Tensor:
        output, *ends = self.flat(x)
        if self.in_place:
            output.mul_(2.0)
        loss = self.head(output).square().sum()
        for k, state in enumerate(ends):
            loss = loss + (state * weights_like(state, 1 + k)).sum()
        return loss

    def flat(self, x: Any) -> tuple[Tensor, ...]:
        output, ends = self.rnn(x)
        data = output.data if isinstance(output, PackedSequence) else output
        return (data, *ends) if isinstance(ends, tuple) else (data, ends)


def weights_like(tensor: Tensor, largest: float) -> Tensor:
    return torch.linspace(-1, largest, tensor.numel(), dtype=F64).view_as(tensor)


def nets(kind: str, **options: Any) -> tuple[Net, Net]:
    """Return the fused network and the one by hand, with equal parameters."""
    torch.manual_seed(3)
    rnn = KINDS[kind](dtype=F64, **options)
    width = (rnn.proj_size or H) * (2 if rnn.bidirectional else 1)
    fused = Net(rnn, width)
    by_hand = Net(ByHand(kind, rnn), width)
    by_hand.head.load_state_dict(fused.head.state_dict())
    return fused, by_hand


def padded(seed: int = 0, samples: int = B) -> Tensor:
    return torch.randn(T, samples, K, dtype=F64, generator=torch.Generator().manual_seed(seed))


def packed(seed: int = 0) -> PackedSequence:
    return pack_padded_sequence(padded(seed), torch.tensor([3, 5, 1, 5]), enforce_sorted=False)


LAYOUTS: dict[str, Callable[[int], Any]] = {"padded": padded, "packed": packed}


def second(
    net: nn.Module, optimizer: str, given: Callable[[int], Any], **options: Any
) -> StepReport:
    """Train two steps with equal random numbers for all networks; return the second's report."""
    torch.manual_seed(11)
    own, seeds = OPTIMIZERS[optimizer](net.parameters()), count()
    report = trained(net, lambda net: net(given(next(seeds))), 2, optimizer=own, **options)[-1]
    assert (report.coverage, report.unsupported) == (1.0, {})
    return report


@pytest.mark.slow(one_in=101)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_readings_are_those_of_linear_layers(
    kind: str, layers: int, bidirectional: bool, bias: bool, layout: str, optimizer: str
) -> None:
    fused, by_hand = nets(kind, num_layers=layers, bidirectional=bidirectional, bias=bias)
    options = {"max_rows": None, "attainable": True}
    found = second(fused, optimizer, LAYOUTS[layout], **options)
    expected = second(by_hand, optimizer, LAYOUTS[layout], **options)
    assert found.notes == expected.notes
    same(found, expected)
    for path, reading in found.layers.items():
        assert reading.rows_total == expected.layers[path].rows_total
        assert not reading.standard_error


# What hides its rows.


class Loop(nn.Module):
    """One cell for all time steps."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(K, H, dtype=F64)
        self.calls: list[tuple[Tensor, Tensor, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        h, total = x.new_zeros(x.shape[1], H), x.new_zeros(())
        for t in range(len(x)):
            h, before = self.cell(x[t], h), h
            h.retain_grad()
            self.calls.append((x[t], before.detach(), h))
            total = total + (h * weights_like(h[0], 2)).square().sum()
        return total


def test_a_cell_is_measured_as_a_whole() -> None:
    net = Loop()
    before = copy.deepcopy(net.cell)
    found = one_step(net, lambda net: net(padded()).backward(), max_rows=None)
    reading = found.layers["cell"]

    @torch.no_grad()
    def outputs(t: float) -> Tensor:
        cell = copy.deepcopy(before)
        for p, after in zip(cell.parameters(), net.cell.parameters(), strict=True):
            p.lerp_(after, t)
        return torch.cat([cell(x, h) for x, h, _ in net.calls])

    d, G = (outputs(-1e-4) - outputs(1e-4)) / 2e-4, torch.cat([z.grad for *_, z in net.calls])
    assert (reading.kind, reading.rows_total) == ("module", T * B)
    cosine = functional.cosine_similarity(d.flatten(), G.flatten(), dim=0)
    assert reading.update_cosine == pytest.approx(float(cosine), rel=1e-6)


def test_masks_between_layers_are_refused() -> None:
    fused, _ = nets("lstm", num_layers=2, dropout=0.5)
    found = one_step(fused, lambda net: net(padded()).backward())
    assert found.layers.keys() == {"head"}
    assert all("put nn.Dropout between" in why for why in found.unsupported.values())
    fused.eval()
    assert one_step(fused, lambda net: net(padded()).backward()).coverage == 1.0


# Loops that reach `.grad` in other ways: recurrent layers must agree with linear layers.


def parts() -> tuple[Tensor, Tensor]:
    return padded(1, 2), padded(2, 3)


def micro_batches(net: nn.Module) -> None:
    for x in parts():
        net(x).backward()
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


def one_graph_twice(net: nn.Module) -> None:
    loss = net(padded())
    loss.backward(retain_graph=True)
    loss.backward()


def attacked_first(net: nn.Module) -> None:
    """Compute the gradient of the input first, in a pass that reaches no parameter."""
    x = padded().requires_grad_()
    loss = net(x)
    torch.autograd.grad(loss, x, retain_graph=True)
    (3 * loss).backward()


def in_one_loss(net: nn.Module) -> None:
    """Call the network twice in one graph."""
    first, second = parts()
    (net(first) * net(second)).backward()


LOOPS = [micro_batches, one_graph_twice, attacked_first, in_one_loss]


@pytest.mark.slow(one_in=19)
@pytest.mark.parametrize("max_rows", [None, 15])  # few rows are alike by chance
@pytest.mark.parametrize("course", LOOPS)
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_courses(kind: str, course: Callable[[nn.Module], None], max_rows: int | None) -> None:
    fused, by_hand = nets(kind, num_layers=2, bidirectional=True)
    whole = one_step(by_hand, course, max_rows=None, attainable=max_rows is None)
    found = one_step(fused, course, max_rows=max_rows, attainable=max_rows is None)
    assert found.coverage == 1.0
    assert len(found.notes) == len(whole.notes)
    if max_rows is None:
        same(found, whole)
        return
    for path, reading in found.layers.items():
        expected = whole.layers[path]
        assert (reading.rows_seen, reading.rows_total) == (max_rows, expected.rows_total)
        if course is not one_graph_twice:  # then only the sample has sums over rows
            assert reading.scale_mean == pytest.approx(expected.scale_mean, rel=1e-5)
        error = reading.standard_error["gradient_cosine"]
        assert reading.gradient_cosine == pytest.approx(expected.gradient_cosine, abs=8 * error)


@pytest.mark.slow(one_in=5)
@pytest.mark.parametrize("used", range(3))
@pytest.mark.parametrize("kind", ["lstm", "projected-lstm"])
def test_a_loss_of_one_output(kind: str, used: int) -> None:
    """A kernel with several outputs passes no gradient to the hooks of unused outputs."""
    fused, by_hand = nets(kind, num_layers=2)

    def backward(net: Net) -> None:
        net.flat(padded())[used].square().sum().backward()

    found = one_step(fused.rnn, lambda _: backward(fused), max_rows=None)
    expected = one_step(by_hand.rnn, lambda _: backward(by_hand), max_rows=None)
    assert found.coverage == 1.0
    # By hand an unused last projection makes no row, here a row with a gradient of zero.
    same(found, expected, but=("idle_share", "common_share"))


@pytest.mark.slow(one_in=3)
@pytest.mark.parametrize("layout", ["batch first", "one sample"])
@pytest.mark.parametrize("kind", KINDS)
def test_layouts_and_initial_states(kind: str, layout: str) -> None:
    """Other layouts of the same data read alike, and so do initial states of zeros."""
    samples = 1 if layout == "one sample" else B
    x = padded(samples=samples)
    fused, _ = nets(kind, num_layers=2)
    expected = one_step(copy.deepcopy(fused.rnn), lambda rnn: last_of(rnn, x).backward())
    h = x.new_zeros(2, samples, fused.rnn.proj_size or H)
    states: Any = (h, x.new_zeros(2, samples, H)) if isinstance(fused.rnn, nn.LSTM) else h
    same(
        one_step(copy.deepcopy(fused.rnn), lambda rnn: last_of(rnn, x, states).backward()), expected
    )
    fused.rnn.batch_first = layout == "batch first"
    turned = x.transpose(0, 1) if layout == "batch first" else x[:, 0]
    same(one_step(fused.rnn, lambda rnn: last_of(rnn, turned).backward(), max_rows=None), expected)


def last_of(rnn: nn.RNNBase, x: Tensor, states: Any = None) -> Tensor:
    """Return a loss of the last state, to which every time step contributes."""
    _, ends = rnn(x, states)
    last: Tensor = ends[0] if isinstance(ends, tuple) else ends
    return last.square().sum()


def test_an_output_that_is_changed_in_place() -> None:
    fused, by_hand = nets("lstm")
    fused.in_place = by_hand.in_place = True
    found = one_step(fused, lambda net: net(padded()).backward(), max_rows=None)
    same(found, one_step(by_hand, lambda net: net(padded()).backward(), max_rows=None))


def backward_in(net: nn.Module, *, low: bool) -> None:
    """Return a backward pass in float32, or with autocast."""
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low):
        output, _ = net(padded().float())
        output.float().square().sum().backward()


@pytest.mark.usefixtures("without_onednn")
def test_autocast() -> None:
    torch.manual_seed(0)
    net = nn.LSTM(K, H, 2)
    found = one_step(copy.deepcopy(net), lambda net: backward_in(net, low=True))
    expected = one_step(net, lambda net: backward_in(net, low=False))
    assert found.layers.keys() == expected.layers.keys()
    assert not found.unsupported
    for path, reading in found.layers.items():
        for name in ("scale_mean", "update_cosine", "gradient_cosine"):
            value = getattr(expected.layers[path], name)
            assert getattr(reading, name) == pytest.approx(value, rel=0.05)
