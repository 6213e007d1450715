"""Parsed calls of recurrent functions: padded, packed, or of a single cell, all in one form.

The arguments are those that `nn.LSTM` passes to the functions: unbatched input has a batch
dimension of one, initial states are in the order of a packed sequence, and zero by default.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from adiv_layers.autocast import autocast_dtype
from torch import Tensor

State = tuple[Tensor, ...]  # (h,); of an LSTM (h, c)
Layout = Literal["time first", "batch first", "packed", "cell"]
Mode = Literal["rnn_tanh", "rnn_relu", "lstm", "gru"]

# The recurrent functions of torch, and the equations that each computes.
LAYERS: dict[Callable[..., Any], Mode] = {
    torch.rnn_tanh: "rnn_tanh",
    torch.rnn_relu: "rnn_relu",
    torch.lstm: "lstm",
    torch.gru: "gru",
}
CELLS: dict[Callable[..., Any], Mode] = {
    torch.rnn_tanh_cell: "rnn_tanh",
    torch.rnn_relu_cell: "rnn_relu",
    torch.lstm_cell: "lstm",
    torch.gru_cell: "gru",
}
RECURRENT = frozenset([*LAYERS, *CELLS])

_OPTIONS = ("params", "has_biases", "num_layers", "dropout", "train", "bidirectional")
_PADDED = ("input", "hx", *_OPTIONS, "batch_first")
_PACKED = ("data", "batch_sizes", "hx", *_OPTIONS)
_CELL = ("input", "hx", "w_ih", "w_hh", "b_ih", "b_hh")


@dataclass(frozen=True, eq=False)
class CellWeights:
    """The weights of one layer in one direction: the tensor objects that were passed.

    Attributes:
        suffix: "_l0", "_l0_reverse" as in the names of `nn.LSTM`; "" of a single cell.
        input: W_ih (gates × H, K).
        hidden: W_hh (gates × H, size of h).
        input_bias: b_ih (gates × H,), or None.
        hidden_bias: b_hh (gates × H,), or None.
        projection: an LSTM's W_hr (size of h, H), or None.
    """

    suffix: str
    input: Tensor
    hidden: Tensor
    input_bias: Tensor | None = None
    hidden_bias: Tensor | None = None
    projection: Tensor | None = None

    @property
    def maps(self) -> list[tuple[str, Tensor, Tensor | None]]:
        """Name, weight and bias of each linear map: "input_l0", "hidden_l0", "projection_l0", …."""
        found: list[tuple[str, Tensor, Tensor | None]] = [
            (f"input{self.suffix}", self.input, self.input_bias),
            (f"hidden{self.suffix}", self.hidden, self.hidden_bias),
        ]
        if self.projection is not None:
            found.append((f"projection{self.suffix}", self.projection, None))
        return found


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
        weights: weights of layer 0, of layer 0 in reverse, of layer 1, …
        directions: 1 or 2.
        dropout: probability of dropout between layers; 0.0 in evaluation and with one layer.
        precision: rounding of the coarsest dtype that the call computes in.
        refusal: why this call can't be unrolled, or None.
    """

    mode: Mode
    input: Tensor
    layout: Layout
    batch_sizes: tuple[int, ...]
    states: State
    weights: tuple[CellWeights, ...]
    directions: int
    dropout: float
    precision: float
    refusal: str | None

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
    """Parse `function(*args, **kwargs)`, for a function of `LAYERS` or `CELLS`.

    This must be called when the call is made: whether cuDNN takes it may change later. Nothing is
    copied.
    """
    if function in CELLS:
        return _read_cell(CELLS[function], _named(_CELL, args, kwargs))
    packed = "batch_sizes" in kwargs or (len(args) > 1 and _is_sizes(args[1]))
    given = _named(_PACKED if packed else _PADDED, args, kwargs)
    directions = 2 if given["bidirectional"] else 1
    dropout = given["dropout"] if given["train"] and given["num_layers"] > 1 else 0.0
    layout: Layout
    if packed:
        input, layout = given["data"], "packed"
        sizes = given["batch_sizes"].tolist()
    else:
        input, layout = given["input"], "batch first" if given["batch_first"] else "time first"
        samples, times = input.shape[:2] if given["batch_first"] else input.shape[1::-1]
        sizes = [samples] * times
    return RecurrentCall(
        mode=LAYERS[function],
        input=input.detach(),
        layout=layout,
        batch_sizes=tuple(sizes),
        states=_state(given["hx"]),
        weights=tuple(
            _weights(given["params"], given["has_biases"], given["num_layers"], directions)
        ),
        directions=directions,
        dropout=dropout,
        precision=_precision(input),
        refusal=_refusal(input) if dropout > 0 else None,
    )


def _read_cell(mode: Mode, given: dict[str, Any]) -> RecurrentCall:
    biases = given.get("b_ih"), given.get("b_hh")
    return RecurrentCall(
        mode=mode,
        input=given["input"].detach(),
        layout="cell",
        batch_sizes=(len(given["input"]),),
        states=tuple(state[None] for state in _state(given["hx"])),
        weights=(CellWeights("", given["w_ih"], given["w_hh"], *biases),),
        directions=1,
        dropout=0.0,
        precision=_precision(given["input"]),
        refusal=None,
    )


def _named(names: Sequence[str], args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(names, args, strict=False)) | kwargs


def _is_sizes(second: object) -> bool:
    """Whether the second argument is `batch_sizes` (integers, packed form) and not a state."""
    return isinstance(second, Tensor) and not second.is_floating_point()


def _state(hx: Tensor | Sequence[Tensor]) -> State:
    return tuple(state.detach() for state in ([hx] if isinstance(hx, Tensor) else hx))


def _weights(
    params: Sequence[Tensor], has_biases: bool, num_layers: int, directions: int
) -> Iterator[CellWeights]:
    """Parse the flat list W_ih, W_hh[, b_ih, b_hh][, W_hr] of every layer and direction."""
    each = len(params) // (num_layers * directions)
    for k in range(num_layers * directions):
        w_ih, w_hh, *rest = params[k * each : (k + 1) * each]
        b_ih, b_hh = rest[:2] if has_biases else (None, None)
        projection = rest[-1] if each % 2 else None
        suffix = f"_l{k // directions}" + ("_reverse" if k % directions else "")
        yield CellWeights(suffix, w_ih, w_hh, b_ih, b_hh, projection)


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
