"""Recurrent layers: the linear maps inside one fused call, unrolled exactly, cell by cell.

`torch.lstm`, `torch.gru`, `torch.rnn_tanh`, `torch.rnn_relu` and their cells hide the gates. The
call is therefore rerun with plain operations, and the gradients of its outputs are backpropagated
to each map's own z = Wφ + b. A row is (time, sample): one use of the weights.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from adiv_layers.autocast import autocast_dtype
from torch import Tensor
from torch.nn import functional

from adiv_monitor.features.features import Features
from adiv_monitor.features.rows import Rows, joined, to_compute_dtype
from adiv_monitor.features.uses import Use
from adiv_monitor.rerun.randomness import Randomness, restored_after

State = tuple[Tensor, ...]  # (h,); of an LSTM (h, c)
Layout = Literal["time first", "batch first", "packed", "cell"]

# The recurrent functions of torch: of single cells, and of whole sequences.
CELLS = frozenset({torch.rnn_tanh_cell, torch.rnn_relu_cell, torch.lstm_cell, torch.gru_cell})
RECURRENT = CELLS | {torch.rnn_tanh, torch.rnn_relu, torch.lstm, torch.gru}

# The arguments that `nn.LSTM` and `nn.LSTMCell` pass to them. Unbatched input has a batch dimension
# of one, initial states are in the order of a packed sequence, and zero by default.
_OPTIONS = ("params", "has_biases", "num_layers", "dropout", "train", "bidirectional")
_PADDED = ("input", "hx", *_OPTIONS, "batch_first")
_PACKED = ("data", "batch_sizes", "hx", *_OPTIONS)
_CELL = ("input", "hx", "w_ih", "w_hh", "b_ih", "b_hh")


# --- the call ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class RecurrentCall:
    """One call of a recurrent function: padded, packed, or of a single cell.

    Attributes:
        mode: the cell's equations: "rnn_tanh", "rnn_relu", "lstm" or "gru".
        input: the input as it was passed, detached.
        layout: layout of input and output: (T, B, …), (B, T, …), packed (rows, …), or (B, …) of a
            cell.
        batch_sizes: number of samples at each time; never increases.
        states: initial h (layers × directions, B, size of h), and c (…, B, H) of an LSTM; detached.
        maps: the linear maps of layer 0, of layer 0 in reverse, of layer 1, …: of the input, of h,
            and perhaps of an LSTM's projection. Their parts are named "input_l0", "hidden_l0",
            "projection_l0", "input_l0_reverse", …; of a cell "input" and "hidden".
        precision: rounding of the coarsest dtype that the call computes in.
        directions: 1 or 2.
        dropout: probability of dropout between layers; 0.0 in evaluation and with one layer.
        refusal: why this call can't be unrolled, or None.
    """

    mode: str
    input: Tensor
    layout: Layout
    batch_sizes: tuple[int, ...]
    states: State
    maps: Sequence[Sequence[Use]]
    precision: float
    directions: int = 1
    dropout: float = 0.0
    refusal: str | None = None

    @property
    def rows(self) -> int:
        """Number of rows of each linear map: samples, summed over time."""
        return sum(self.batch_sizes)

    @property
    def draws(self) -> bool:
        """Whether the call draws random numbers; `unroll` then needs a `Randomness`."""
        return self.dropout > 0


def read_call(
    function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> RecurrentCall:
    """Parse `function(*args, **kwargs)`, for a function of `RECURRENT`.

    This must be called when the call is made: whether cuDNN takes it may change later. Nothing is
    copied.
    """
    mode = function.__name__.removesuffix("_cell")
    if function in CELLS:
        given = dict(zip(_CELL, args, strict=False)) | kwargs
        input, states = given["input"], tuple(state[None] for state in _state(given["hx"]))
        parts = [given["w_ih"], given["w_hh"], given.get("b_ih"), given.get("b_hh")]
        sizes, maps = (len(input),), [_maps(mode, "", parts)]
        return RecurrentCall(mode, input.detach(), "cell", sizes, states, maps, _precision(input))
    # The second argument is a state, or the integers of a packed sequence.
    second = args[1] if len(args) > 1 else None
    has_sizes = isinstance(second, Tensor) and not second.is_floating_point()
    packed = has_sizes or "batch_sizes" in kwargs
    given = dict(zip(_PACKED if packed else _PADDED, args, strict=False)) | kwargs
    layout: Layout = "packed" if packed else "batch first" if given["batch_first"] else "time first"
    input = given["data" if packed else "input"]
    if packed:
        sizes = tuple(given["batch_sizes"].tolist())
    else:
        samples, times = input.shape[:2] if given["batch_first"] else input.shape[1::-1]
        sizes = (samples,) * times
    directions = 2 if given["bidirectional"] else 1
    dropout = given["dropout"] if given["train"] and given["num_layers"] > 1 else 0.0
    return RecurrentCall(
        mode,
        input.detach(),
        layout,
        sizes,
        states=_state(given["hx"]),
        maps=list(_by_layer(mode, given, directions)),
        precision=_precision(input),
        directions=directions,
        dropout=dropout,
        refusal=_refusal(input) if dropout > 0 else None,
    )


def _state(hx: Tensor | Sequence[Tensor]) -> State:
    return tuple(state.detach() for state in ([hx] if isinstance(hx, Tensor) else hx))


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


def _precision(input: Tensor) -> float:
    """Return the rounding of the coarser of the input's and autocast's dtypes."""
    cast = autocast_dtype(input)
    return max(torch.finfo(dtype).eps for dtype in (input.dtype, cast) if dtype is not None)


def _refusal(input: Tensor) -> str | None:
    """Return why the dropout masks between the layers can't be drawn again, or None."""
    device = input.device.type
    plain_cuda = torch.version.hip is None and not torch.cudnn_is_acceptable(input)
    if device == "cpu" or (device == "cuda" and plain_cuda):
        return None
    return (
        f"the fused kernel on {device} (cuDNN's, for one) draws the masks of dropout between "
        "recurrent layers itself, so they can't be drawn again: put nn.Dropout between one-layer "
        "networks, or set dropout=0, or torch.backends.cudnn.enabled = False"
    )


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
        nodes = {tensor.grad_fn for tensor in given}
        return cls(
            tuple(tensor.detach() for tensor in given),
            tuple(tensor._version for tensor in given),
            call.layout == "cell" and len(nodes) == 2,
        )


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


def uses_of(call: RecurrentCall) -> list[Use]:
    """Return the linear maps of a call, named as those that `unroll` returns with their rows."""
    return [use for maps in call.maps for use in maps]


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
    pairs = zip(returned.outputs, gradients, strict=True)
    upstream = _laid_out(call, [torch.zeros_like(z) if g is None else g for z, g in pairs])
    with torch.enable_grad(), torch.autocast(call.input.device.type, enabled=False):
        maps, made = _run(call, returned.outputs[0].dtype, random)
        if returned.c_enters_h:
            made[1].register_hook(lambda _: upstream[1])  # type: ignore[no-untyped-call]
        found = iter(torch.autograd.grad(made, [z for x in maps for z in x.z], upstream))
    closed = [x.closed([next(found) for _ in x.z]) for x in maps]
    off, length = made[0].new_zeros(2)
    outputs = zip(made, _laid_out(call, returned.outputs), returned.versions, strict=True)
    for (ours, theirs, version), output in zip(outputs, returned.outputs, strict=True):
        if output._version == version:
            off = off + (ours.detach() - theirs).square().sum()
            length = length + theirs.square().sum()
    return closed, (off / length.clamp(min=torch.finfo(length.dtype).tiny)).sqrt()


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
    width = call.directions * call.states[0].shape[-1]
    ones = torch.ones(call.rows, width, dtype=dtype, device=call.input.device)
    with restored_after(random.devices):
        random.set()
        between = len(call.maps) // call.directions - 1
        return [to_compute_dtype(torch.dropout(ones, call.dropout, True)) for _ in range(between)]


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


def _run(
    call: RecurrentCall, dtype: torch.dtype, random: Randomness | None
) -> tuple[list[_OpenMap], list[Tensor]]:
    """Run all layers; return maps, the output (rows, channels) unless a cell, and last states."""
    masks = _masks(call, dtype, random)
    # The leaves require gradients so that every z is part of the graph.
    x, *states = (
        to_compute_dtype(tensor.detach()).requires_grad_() for tensor in (call.input, *call.states)
    )
    x = _by_time(x, call.layout)
    maps: list[_OpenMap] = []
    ends: list[State] = []
    for first in range(0, len(call.maps), call.directions):
        if first > 0 and masks:
            x = x * masks[first // call.directions - 1]
        sides = []
        for k in range(first, first + call.directions):
            state = tuple(of_all[k] for of_all in states)
            opened, side, end = _layer(call, call.maps[k], x, state, backwards=k > first)
            maps += opened
            sides.append(side)
            ends.append(end)
        x = torch.cat(sides, -1)
    if call.layout == "cell":
        return maps, list(ends[0])
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
