"""Recurrent layers: the linear maps inside one fused call, unrolled exactly, cell by cell.

`torch.lstm`, `torch.gru`, `torch.rnn_tanh` and `torch.rnn_relu` hide the gates. The call is
therefore rerun with plain operations, and the gradients of its outputs are backpropagated to each
map's own z = Wφ + b. A row is (time, sample): one use of the weights.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from adiv_layers.autocast import autocast_dtype
from torch import Tensor
from torch.nn import functional

from adiv_monitor.features.features import Features
from adiv_monitor.features.rows import Rows, joined, to_compute_dtype
from adiv_monitor.features.uses import Refused, Use

State = tuple[Tensor, ...]  # (h,); of an LSTM (h, c)

RECURRENT = frozenset({torch.rnn_tanh, torch.rnn_relu, torch.lstm, torch.gru})

# The arguments that `nn.LSTM` passes to them. Unbatched input has a batch dimension of one, initial
# states are in the order of a packed sequence, and zero by default.
_OPTIONS = ("params", "has_biases", "num_layers", "dropout", "train", "bidirectional")
_PADDED = ("input", "hx", *_OPTIONS, "batch_first")
_PACKED = ("data", "batch_sizes", "hx", *_OPTIONS)


# --- the call ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class RecurrentCall:
    """One call of a recurrent function: padded or packed.

    Attributes:
        mode: the cell's equations: "rnn_tanh", "rnn_relu", "lstm" or "gru".
        input: the input as it was passed, detached.
        time: the dimension of time in input and output; None: they are packed.
        batch_sizes: number of samples at each time; never increases.
        states: initial h (layers × directions, B, size of h), and c (…, B, H) of an LSTM; detached.
        maps: the linear maps of layer 0, of layer 0 in reverse, of layer 1, …: of the input, of h,
            and perhaps of an LSTM's projection. Their parts are named "input_l0", "hidden_l0",
            "projection_l0", "input_l0_reverse", ….
        precision: rounding of the coarsest dtype that the call computes in.
        directions: 1 or 2.
    """

    mode: str
    input: Tensor
    time: int | None
    batch_sizes: tuple[int, ...]
    states: State
    maps: Sequence[Sequence[Use]]
    precision: float
    directions: int

    @property
    def rows(self) -> int:
        """Number of rows of each linear map: samples, summed over time."""
        return sum(self.batch_sizes)

    @property
    def uses(self) -> list[Use]:
        """All linear maps, named as those that `unroll` returns with their rows."""
        return [use for maps in self.maps for use in maps]

    def by_time(self, tensor: Tensor) -> Tensor:
        """Return input or output as rows by time, then sample: (rows, channels)."""
        return tensor if self.time is None else tensor.transpose(0, self.time).flatten(0, 1)


def read_call(
    function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> RecurrentCall:
    """Parse `function(*args, **kwargs)`, for a function of `RECURRENT`. Nothing is copied.

    Raises:
        Refused: the call zeroes entries between its layers at random.
    """
    # The second argument is a state, or the integers of a packed sequence.
    second = args[1] if len(args) > 1 else None
    has_sizes = isinstance(second, Tensor) and not second.is_floating_point()
    packed = has_sizes or "batch_sizes" in kwargs
    given = dict(zip(_PACKED if packed else _PADDED, args, strict=False)) | kwargs
    if given["dropout"] > 0 and given["train"] and given["num_layers"] > 1:
        raise Refused(
            "the masks of dropout between recurrent layers are not accessible: put nn.Dropout "
            "between one-layer networks, or set dropout=0"
        )
    input, time = given["data" if packed else "input"], None
    if packed:
        sizes = tuple(given["batch_sizes"].tolist())
    else:
        time = int(given["batch_first"])
        sizes = (input.shape[1 - time],) * input.shape[time]
    directions = 2 if given["bidirectional"] else 1
    hx = given["hx"]
    cast = autocast_dtype(input)
    return RecurrentCall(
        function.__name__,
        input.detach(),
        time,
        sizes,
        states=tuple(state.detach() for state in ([hx] if isinstance(hx, Tensor) else hx)),
        maps=list(_by_layer(function.__name__, given, directions)),
        precision=max(torch.finfo(x).eps for x in (input.dtype, cast) if x is not None),
        directions=directions,
    )


def _by_layer(mode: str, given: dict[str, Any], directions: int) -> Iterator[Sequence[Use]]:
    """Parse the flat list W_ih, W_hh[, b_ih, b_hh][, W_hr] of every layer and direction."""
    count = given["num_layers"] * directions
    each = len(given["params"]) // count
    for k in range(count):
        parts = list(given["params"][k * each : (k + 1) * each])
        if not given["has_biases"]:
            parts[2:2] = None, None
        yield _maps(mode, f"_l{k // directions}" + ("_reverse" if k % directions else ""), parts)


def _maps(mode: str, suffix: str, parts: Sequence[Any]) -> Sequence[Use]:
    """Return the maps of one layer in one direction, from W_ih, W_hh, b_ih, b_hh[, W_hr]."""
    w_ih, w_hh, b_ih, b_hh, *projection = parts
    maps = [("input", w_ih, b_ih), ("hidden", w_hh, b_hh)]
    maps += [("projection", w_hr, None) for w_hr in projection]
    return [Use(mode, w, b, _unknown, part=f"{name}{suffix}") for name, w, b in maps]


def _unknown(rows: Rows) -> Features:
    raise RuntimeError("the rows of a recurrent layer are known only after its call is unrolled")


# --- the maps ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Map:
    """One linear map of a recurrent call with all its rows: ∂L/∂W = gradientᵀ inputs.

    The precision is float32, or float64 if the call's was. All maps of a call have the same rows in
    the same order: by time, then sample. `inputs` may share memory with the call's input.

    Attributes:
        use: the map, with the tensor objects that were passed.
        inputs: φ_W of all rows, (rows, K).
        z: Wφ_W + b, (rows, N): the output of this map alone, before the gates.
        gradient: ∂L/∂z, (rows, N).
    """

    use: Use
    inputs: Tensor
    z: Tensor
    gradient: Tensor


def unroll(call: RecurrentCall, gradients: Mapping[int, Tensor]) -> list[Map]:
    """Return every linear map of the call, layer by layer, with all its rows.

    Parameters, gradients, graph, autocast and random numbers of the run are not changed. The cost
    of one forward and backward pass over the sequence is 7 kernels for each time, layer and
    direction (LSTM: 28, GRU: 26), and at the peak 13 H numbers for each row, layer and direction
    (31 H, 25 H), of which the maps keep about half.

    Args:
        call: the call.
        gradients: the loss gradients of outputs, by place, as hooks on them get them; others are 0.
    """
    with torch.enable_grad(), torch.autocast(call.input.device.type, enabled=False):
        maps, made = _run(call)
        given = {i: call.by_time(g) if i == 0 else g for i, g in gradients.items()}
        upstream = [
            to_compute_dtype(given[i]) if i in given else torch.zeros_like(x)
            for i, x in enumerate(made)
        ]
        found = iter(torch.autograd.grad(made, [z for x in maps for z in x.z], upstream))
    return [x.closed([next(found) for _ in x.z]) for x in maps]


class _OpenMap:
    """A linear map that collects its inputs and results, for all times at once or one by one."""

    def __init__(self, use: Use, *, backwards: bool) -> None:
        self.use, self.backwards = use, backwards
        self.inputs: list[Tensor] = []
        self.z: list[Tensor] = []
        given = (use.weight, use.bias)
        self._own = [None if p is None else to_compute_dtype(p.detach()) for p in given]

    def __call__(self, x: Tensor) -> Tensor:
        self.inputs.append(x)
        self.z.append(functional.linear(x, *self._own))  # type: ignore[arg-type]
        return self.z[-1]

    def by_time(self, parts: list[Tensor]) -> Tensor:
        """Join the parts of successive calls into rows by time."""
        return joined(parts[::-1] if self.backwards else parts)

    def closed(self, gradients: list[Tensor]) -> Map:
        """Return the map with all its rows, without the graph."""
        rows = (self.by_time(parts).detach() for parts in (self.inputs, self.z, gradients))
        return Map(self.use, *rows)


def _run(call: RecurrentCall) -> tuple[list[_OpenMap], list[Tensor]]:
    """Run all layers; return maps, the output (rows, channels) and the last states."""
    # The leaves require gradients so that every z is part of the graph.
    x, *states = (
        to_compute_dtype(tensor.detach()).requires_grad_() for tensor in (call.input, *call.states)
    )
    x = call.by_time(x)
    maps: list[_OpenMap] = []
    ends: list[State] = []
    for first in range(0, len(call.maps), call.directions):
        sides = []
        for k in range(first, first + call.directions):
            state = tuple(of_all[k] for of_all in states)
            opened, side, end = _layer(call, call.maps[k], x, state, backwards=k > first)
            maps += opened
            sides.append(side)
            ends.append(end)
        x = torch.cat(sides, -1)
    return maps, [x, *(torch.stack(of_all) for of_all in zip(*ends, strict=True))]


def _layer(
    call: RecurrentCall, uses: Sequence[Use], x: Tensor, state: State, backwards: bool
) -> tuple[list[_OpenMap], Tensor, State]:
    """Run a layer in one direction; return maps, outputs (rows, size of h) and last state."""
    maps = [_OpenMap(use, backwards=backwards) for use in uses]
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
        # Samples that have ended, or not begun, keep their state.
        pairs = zip(new, state, strict=True)
        state = tuple(n if len(n) == len(s) else torch.cat([n, s[len(n) :]]) for n, s in pairs)
    return maps, recur.by_time(outputs), state


# --- their equations -----------------------------------------------------------------------------

Step = Callable[..., State]  # (input map's z, hidden map's z, *state) → the next state


def _lstm(z_input: Tensor, z_hidden: Tensor, h: Tensor, c: Tensor) -> State:
    i, f, g, o = (z_input + z_hidden).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru(z_input: Tensor, z_hidden: Tensor, h: Tensor) -> State:
    (r, z, n), (hidden_r, hidden_z, hidden_n) = (x.chunk(3, -1) for x in (z_input, z_hidden))
    n = torch.tanh(n + (r + hidden_r).sigmoid() * hidden_n)
    return (n + (z + hidden_z).sigmoid() * (h - n),)


_STEPS: dict[str, Step] = {
    "rnn_tanh": lambda z_input, z_hidden, h: (torch.tanh(z_input + z_hidden),),
    "rnn_relu": lambda z_input, z_hidden, h: (torch.relu(z_input + z_hidden),),
    "lstm": _lstm,
    "gru": _gru,
}
