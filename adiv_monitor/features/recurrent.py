"""Recurrent layers: the linear maps inside one fused call, unrolled exactly, cell by cell.

`torch.lstm`, `torch.gru`, `torch.rnn_tanh`, `torch.rnn_relu` and their cells hide the gates. The
call is therefore rerun with plain operations, and the gradients of its outputs are backpropagated
to each map's own z = Wφ + b. A row is (time, sample): one use of the weights.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from adiv_monitor.features.features import Features
from adiv_monitor.features.recurrent_call import CellWeights, Layout, Mode, RecurrentCall, State
from adiv_monitor.features.rows import Rows, joined, to_compute_dtype
from adiv_monitor.features.uses import Use
from adiv_monitor.rerun.randomness import Randomness

Step = Callable[..., State]  # (input map's z, hidden map's z, *state) → the next state


def _rnn_tanh(z_input: Tensor, z_hidden: Tensor, h: Tensor) -> State:
    return (torch.tanh(z_input + z_hidden),)


def _rnn_relu(z_input: Tensor, z_hidden: Tensor, h: Tensor) -> State:
    return (torch.relu(z_input + z_hidden),)


def _lstm(z_input: Tensor, z_hidden: Tensor, h: Tensor, c: Tensor) -> State:
    i, f, g, o = (z_input + z_hidden).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru(z_input: Tensor, z_hidden: Tensor, h: Tensor) -> State:
    input_r, input_z, input_n = z_input.chunk(3, -1)
    hidden_r, hidden_z, hidden_n = z_hidden.chunk(3, -1)
    n = torch.tanh(input_n + (input_r + hidden_r).sigmoid() * hidden_n)
    return (n + (input_z + hidden_z).sigmoid() * (h - n),)


_STEPS: dict[Mode, Step] = {
    "rnn_tanh": _rnn_tanh,
    "rnn_relu": _rnn_relu,
    "lstm": _lstm,
    "gru": _gru,
}


@dataclass(frozen=True, eq=False)
class Map:
    """One linear map of a recurrent call with all its rows: ∂L/∂W = gradientᵀ inputs.

    The precision is float32, or float64 if the call's was. All maps of a call have the same rows in
    the same order: by time, then sample. `inputs` may share memory with the call's input.

    Attributes:
        name: "input_l0", "hidden_l0", "projection_l0", "input_l0_reverse", …; of a cell "input" and
            "hidden".
        weight: W (N, K), the tensor object that was passed.
        bias: b (N,), the tensor object that was passed, or None; ∂L/∂b = Σ_r gradient_r.
        inputs: φ_W of all rows, (rows, K).
        z: Wφ_W + b, (rows, N): the output of this map alone, before the gates.
        gradient: ∂L/∂z, (rows, N).
    """

    name: str
    weight: Tensor
    bias: Tensor | None
    inputs: Tensor
    z: Tensor
    gradient: Tensor


@dataclass(frozen=True, eq=False)
class Returned:
    """The results of a recurrent call without their graph, so that a hook in it may hold them.

    Attributes:
        outputs: (output, h_n) or (output, h_n, c_n); of a cell (h,) or (h, c); detached.
        versions: version counter of each output, to detect writes.
        c_enters_h: h of an LSTM cell was computed from the returned c itself, as on a CPU. A hook
            on c then gets all of ∂L/∂c, including the part through h; where one kernel returns
            both, the hook gets ∂L/∂c without that part.
    """

    outputs: tuple[Tensor, ...]
    versions: tuple[int, ...]
    c_enters_h: bool

    @classmethod
    def of(cls, call: RecurrentCall, result: Tensor | Sequence[Tensor]) -> "Returned":
        """Record the tensors that the call has just returned; copies of them do not work."""
        given = (result,) if isinstance(result, Tensor) else tuple(result)
        c_enters_h = False
        if call.layout == "cell" and len(given) == 2:
            h, c = given
            c_enters_h = h.grad_fn is not c.grad_fn
        detached = tuple(tensor.detach() for tensor in given)
        return cls(detached, tuple(tensor._version for tensor in detached), c_enters_h)

    @property
    def unchanged(self) -> list[int]:
        """Indices of the outputs that have not been written to since."""
        pairs = zip(self.outputs, self.versions, strict=True)
        return [i for i, (tensor, version) in enumerate(pairs) if tensor._version == version]


def uses_of(call: RecurrentCall) -> Iterator[Use]:
    """Yield the linear maps of a call, named as those that `unroll` returns with their rows."""

    def features(rows: Rows) -> Features:
        raise RuntimeError(
            "the rows of a recurrent layer are known only after its call is unrolled"
        )

    for weights in call.weights:
        for name, weight, bias in weights.maps:
            yield Use(call.mode, weight, bias, features, part=name)


def unroll(
    call: RecurrentCall,
    returned: Returned,
    gradients: Sequence[Tensor | None],
    random: Randomness | None = None,
) -> tuple[list[Map], Tensor]:
    """Return every linear map of the call, layer by layer, with all its rows; and an error.

    The error is ‖unrolled − real outputs‖ / ‖real outputs‖ over all outputs that were not changed
    in place since, shape (). If it is above the rounding of the call's precision (bfloat16 under
    autocast, TF32 in cuDNN by default), the unrolled computation differs from the call, and the
    gradients are wrong.

    Parameters, gradients, graph, autocast and random numbers of the run are not changed. The cost
    of one forward and backward pass over the sequence is 7 kernels for each time, layer and
    direction (LSTM: 28, GRU: 26), and at the peak 13 H numbers for each row, layer and direction
    (31 H, 25 H), of which the maps keep about half.

    Args:
        call: the call.
        returned: the call's results.
        gradients: the loss gradient of each output, as a hook on it gets it; None for zero.
        random: if the call draws random numbers: the generators' state just before it.
    """
    reached = [
        torch.zeros_like(output) if gradient is None else gradient
        for output, gradient in zip(returned.outputs, gradients, strict=True)
    ]
    upstream = _laid_out(call, reached)
    masks = _masks(call, returned.outputs[0].dtype, random)
    with torch.enable_grad(), torch.autocast(call.input.device.type, enabled=False):
        maps, made = _run(call, masks)
        if returned.c_enters_h:
            made[1].register_hook(lambda _: upstream[1])  # type: ignore[no-untyped-call]
        found = torch.autograd.grad(made, [z for linear in maps for z in linear.z], upstream)
    taken = iter(found)
    closed = [linear.closed([next(taken) for _ in linear.z]) for linear in maps]
    real = _laid_out(call, returned.outputs)
    return closed, _distance(made, real, returned.unchanged)


@torch.no_grad()
def maps_of(
    call: RecurrentCall, dtype: torch.dtype, random: Randomness | None = None
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return inputs and z of all rows of every linear map, by name: the forward of `unroll`.

    Args:
        call: the call.
        dtype: dtype of the call's output.
        random: see `unroll`.
    """
    masks = _masks(call, dtype, random)
    with torch.autocast(call.input.device.type, enabled=False):
        maps, _ = _run(call, masks)
    return {x.name: (x.by_time(x.inputs), x.by_time(x.z)) for x in maps}


def _laid_out(call: RecurrentCall, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the call's outputs, or their gradients, in the layout of `_run`."""
    given = [to_compute_dtype(tensor.detach()) for tensor in tensors]
    if call.layout == "cell":
        return given
    return [_by_time(given[0], call.layout), *given[1:]]


def _by_time(tensor: Tensor, layout: Layout) -> Tensor:
    """Return input or output as rows by time, then sample: (rows, channels)."""
    if layout in ("packed", "cell"):
        return tensor
    return (tensor.transpose(0, 1) if layout == "batch first" else tensor).flatten(0, 1)


def _masks(call: RecurrentCall, dtype: torch.dtype, random: Randomness | None) -> list[Tensor]:
    """Return the dropout masks of all layers' outputs but the last's: 0 or 1/(1 − dropout).

    They are drawn again in the same number, order and precision as in the call itself.
    """
    if not call.draws:
        return []
    assert random is not None
    device = call.input.device
    width = call.directions * call.states[0].shape[-1]
    ones = torch.ones(call.rows, width, dtype=dtype, device=device)
    with random.again():
        between = len(call.weights) // call.directions - 1
        return [to_compute_dtype(torch.dropout(ones, call.dropout, True)) for _ in range(between)]


@dataclass(eq=False)
class _OpenMap:
    """A linear map that collects its inputs and results, for all times at once or one by one."""

    name: str
    weight: Tensor
    bias: Tensor | None
    backwards: bool = False
    inputs: list[Tensor] = field(default_factory=list)
    z: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._weight = to_compute_dtype(self.weight.detach())
        self._bias = None if self.bias is None else to_compute_dtype(self.bias.detach())

    def __call__(self, x: Tensor) -> Tensor:
        self.inputs.append(x)
        self.z.append(functional.linear(x, self._weight, self._bias))
        return self.z[-1]

    def by_time(self, parts: list[Tensor]) -> Tensor:
        """Join the parts of successive calls into rows by time."""
        return joined(parts[::-1] if self.backwards else parts)

    def closed(self, gradients: list[Tensor]) -> Map:
        """Return the map with all its rows, without the graph."""
        rows = (self.by_time(parts).detach() for parts in (self.inputs, self.z, gradients))
        return Map(self.name, self.weight, self.bias, *rows)


def _run(call: RecurrentCall, masks: list[Tensor]) -> tuple[list[_OpenMap], list[Tensor]]:
    """Run all layers; return maps, the output (rows, channels) unless a cell, and last states."""
    # The leaves require gradients so that every z is part of the graph.
    x, *states = (
        to_compute_dtype(tensor.detach()).requires_grad_() for tensor in (call.input, *call.states)
    )
    x = _by_time(x, call.layout)
    maps: list[_OpenMap] = []
    ends: list[State] = []
    for first in range(0, len(call.weights), call.directions):
        if first > 0 and masks:
            x = x * masks[first // call.directions - 1]
        sides = []
        for k in range(first, first + call.directions):
            state = tuple(of_all[k] for of_all in states)
            opened, side, end = _layer(call, call.weights[k], x, state, backwards=k > first)
            maps += opened
            sides.append(side)
            ends.append(end)
        x = torch.cat(sides, -1)
    if call.layout == "cell":
        return maps, list(ends[0])
    return maps, [x, *(torch.stack(of_all) for of_all in zip(*ends, strict=True))]


def _layer(
    call: RecurrentCall, weights: CellWeights, x: Tensor, state: State, backwards: bool
) -> tuple[list[_OpenMap], Tensor, State]:
    """Run a layer in one direction; return maps, outputs (rows, size of h) and last state."""
    maps = [_OpenMap(*linear, backwards) for linear in weights.maps]
    enter, recur, *projection = maps
    z_input = torch.split(enter(x), list(call.batch_sizes))
    step = _STEPS[call.mode]
    outputs = []
    times = range(len(call.batch_sizes))
    for t in reversed(times) if backwards else times:
        present = [s[: call.batch_sizes[t]] for s in state]
        new = step(z_input[t], recur(present[0]), *present)
        if projection:
            new = (projection[0](new[0]), *new[1:])
        outputs.append(new[0])
        state = tuple(_renewed(s, n) for s, n in zip(state, new, strict=True))
    return maps, recur.by_time(outputs), state


def _renewed(state: Tensor, new: Tensor) -> Tensor:
    """Return the new state; samples that have ended, or not begun, keep the old one."""
    return new if len(new) == len(state) else torch.cat([new, state[len(new) :]])


def _distance(made: list[Tensor], real: list[Tensor], compared: list[int]) -> Tensor:
    if not compared:
        return made[0].new_zeros(())
    ours, theirs = (
        torch.cat([tensors[i].detach().flatten() for i in compared]) for tensors in (made, real)
    )
    length = torch.linalg.vector_norm(theirs).clamp(min=torch.finfo(theirs.dtype).tiny)
    distance: Tensor = torch.linalg.vector_norm(ours - theirs) / length
    return distance
