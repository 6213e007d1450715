"""Every function that uses parameters, with several shapes and arguments; float64.

Each case states, independently of the monitor's code, which dimensions of a use's result are
channels; all other dimensions are rows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function


def everything(z: Tensor) -> Tensor:
    return z


@dataclass(frozen=True)
class Of:
    """One expected use of parameters: its rows, and what is exact when they are sampled.

    Attributes:
        weight: name of its weight.
        bias: name of its bias.
        channels: dimensions of the result (of its part) that are channels.
        groups: groups of channels with a scale each.
        part: selects the part of the result that depends on the use.
        one_pass: whether one pass yields the scales of all rows.
    """

    weight: str | None
    bias: str | None = None
    channels: tuple[int, ...] = (-1,)
    groups: int = 1
    part: Callable[[Tensor], Tensor] = everything
    one_pass: bool = True

    @property
    def path(self) -> str:
        path = self.weight or self.bias
        assert path is not None
        return path

    def rows(self, z: Tensor) -> Tensor:
        """Reshape a result to (rows, n_total)."""
        z = self.part(z)
        if not self.channels:
            return z.reshape(-1, 1)
        last = tuple(range(-len(self.channels), 0))
        return z.movedim(self.channels, last).flatten(last[0]).reshape(-1, _size(z, self.channels))


def _size(z: Tensor, dims: Sequence[int]) -> int:
    size = 1
    for dim in dims:
        size *= z.shape[dim]
    return size


@dataclass(frozen=True)
class FunctionCase:
    """A call of a function, with its expected uses of parameters.

    Attributes:
        call: (parameters, inputs) → z.
        shapes: of the parameters, by name.
        inputs: makes the call's inputs.
        uses: expected uses.
        overwrites: whether the call changes its input in place.
    """

    call: Callable[..., Tensor]
    shapes: Mapping[str, tuple[int, ...]]
    inputs: Callable[[], Sequence[Tensor]]
    uses: Sequence[Of]
    overwrites: bool = False

    def model(self) -> "Caller":
        torch.manual_seed(3)
        return Caller(self.call, self.shapes)

    def data(self) -> list[Tensor]:
        torch.manual_seed(4)
        return list(self.inputs())


class Caller(nn.Module):
    """A module that holds the parameters of one call."""

    def __init__(self, call: Callable[..., Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, dtype=torch.float64)))
        self.call = call

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.called(dict(self._parameters), *inputs)

    def called(self, parameters: Mapping[str, Any], *inputs: Tensor) -> Tensor:
        return self.call(Names(parameters), *(tensor.clone() for tensor in inputs))


@dataclass
class Names:
    """Parameters, accessed as attributes."""

    values: Mapping[str, Tensor] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Tensor:
        return self.values[name]


def randn(*shapes: tuple[int, ...]) -> Callable[[], list[Tensor]]:
    return lambda: [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def grouped_mm(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    """Compute `torch.nn.functional.grouped_mm` in float64, which torch's own does not support."""
    if has_torch_function((x, w)):
        return handle_torch_function(grouped_mm, (x, w), x, w, offs=offs)
    starts, ends = [0, *offs[:-1].tolist()], offs.tolist()
    parts = [x[a:b] @ w[e] for e, (a, b) in enumerate(zip(starts, ends, strict=True))]
    return torch.cat([*parts, torch.full((len(x) - ends[-1], w.shape[2]), torch.nan).to(x)])


X = 4  # number of inputs
W = Of("w")


def gain(*channels: int, groups: int, name: str = "w") -> Of:
    return Of(name, channels=channels, groups=groups, one_pass=False)


def constant(*channels: int, name: str = "w", part: Callable[[Tensor], Tensor] = everything) -> Of:
    """Return the use of an offset that is the same at all positions."""
    return Of(None, name, channels, part=part, one_pass=False)


CASES: dict[str, FunctionCase] = {}


def case(
    name: str,
    call: Callable[..., Tensor],
    shapes: Mapping[str, tuple[int, ...]] | tuple[int, ...],
    inputs: Callable[[], Sequence[Tensor]] | tuple[int, ...],
    *uses: Of,
    overwrites: bool = False,
) -> None:
    assert name not in CASES
    CASES[name] = FunctionCase(
        call,
        {"w": shapes} if isinstance(shapes, tuple) else shapes,
        randn(inputs) if isinstance(inputs, tuple) else inputs,
        uses or (W,),
        overwrites,
    )


# --- affine maps ---------------------------------------------------------------------------------

case("linear", lambda p, x: F.linear(x, p.w, p.b), {"w": (3, 4), "b": (3,)}, (5, 4), Of("w", "b"))
case("linear-tokens", lambda p, x: F.linear(x, p.w), (3, 4), (2, 3, 4))
case("linear-of-its-square", lambda p, x: F.linear(x**2, p.w.t()), (4, 3), (5, 4))

# --- products ------------------------------------------------------------------------------------

case("mm", lambda p, x: torch.mm(x, p.w), (4, 3), (5, 4))
case("mm-left", lambda p, x: torch.mm(p.w, x), (3, 4), (4, 5), Of("w", channels=(0,)))
case("matmul-by-name", lambda p, x: torch.matmul(input=x, other=p.w), (4, 3), (2, 5, 4))
case("matmul-vector-right", lambda p, x: x @ p.w, (4,), (2, 3, 4), Of("w", channels=()))
case("matmul-vector-left", lambda p, x: p.w @ x, (4,), (2, 4, 3), Of("w", channels=()))
case("matmul-left-of-stack", lambda p, x: p.w @ x, (3, 4), (2, 4, 5), Of("w", channels=(1,)))
case("matmul-stack", lambda p, x: x @ p.w, (2, 4, 3), (2, 5, 4))
case("matmul-stack-of-matrix", lambda p, x: x @ p.w, (2, 4, 3), (5, 4), Of("w", channels=(0, 2)))
case("matmul-stack-broadcast", lambda p, x: x @ p.w, (2, 1, 4, 3), (2, 6, 5, 4))
case("matmul-stack-of-vectors", lambda p, x: p.w @ x, (2, 1, 4), (2, 4, 5), Of("w", channels=(1,)))
case("mv", lambda p, x: torch.mv(p.w, x), (3, 4), (4,))
case("dot", lambda p, x: torch.dot(p.w, x), (4,), (4,), Of("w", channels=()))
case("bmm", lambda p, x: torch.bmm(x, p.w), (3, 4, 2), (3, 5, 4))
case("bmm-left", lambda p, x: torch.bmm(p.w, x), (3, 2, 4), (3, 4, 5), Of("w", channels=(1,)))
case("bmm-one-expert", lambda p, x: torch.bmm(x, p.w), (1, 4, 2), (1, 5, 4))

_AB = {"w": (4, 3), "b": (3,)}
case("addmm", lambda p, x: torch.addmm(p.b, x, p.w), _AB, (5, 4), Of("w", "b"))
case(
    "addmm-left",
    lambda p, x: torch.addmm(p.b, p.w, x),
    {"w": (3, 4), "b": (5,)},
    (4, 5),
    Of("w", channels=(0,)),
    constant(-1, name="b"),
)
case(
    "baddbmm",
    lambda p, x: torch.baddbmm(p.b, x, p.w),
    {"w": (2, 4, 3), "b": (2, 1, 3)},
    (2, 5, 4),
    W,
    Of("b"),
)

# --- einsum --------------------------------------------------------------------------------------


def einsum(equation: str, shape: tuple[int, ...], x: tuple[int, ...] | Callable, *uses: Of) -> None:
    case(
        f"einsum {equation} {shape}", lambda p, *x: torch.einsum(equation, *x, p.w), shape, x, *uses
    )


einsum("bi,oi->bo", (3, 4), (5, 4))
einsum("bti,oi", (3, 4), (2, 5, 4), Of("w", channels=(1,)))  # torch's order: b o t
einsum("bti,Oi", (3, 4), (2, 5, 4), Of("w", channels=(0,)))  # O b t
einsum("...i,oi->...o", (3, 4), (2, 2, 4))
einsum("...i,io", (4, 3), (2, 2, 4))
einsum("...c,...c->...", (4,), (2, 3, 4), Of("w", channels=()))
einsum("b...i,...io->b...o", (2, 4, 3), (5, 2, 4))
einsum("...i,...io->...o", (2, 4, 3), (5, 2, 4))
einsum("bthd,hde->bthe", (2, 4, 3), (2, 3, 2, 4))
einsum("ecd,edf->ecf", (2, 4, 3), (2, 5, 4))
einsum("td,edf->tef", (2, 4, 3), (5, 4), Of("w", channels=(1, 2)))
einsum("bthd,hed->bte", (2, 3, 4), (2, 3, 2, 4))  # the output projection of attention
einsum("bd,d->bd", (4,), (5, 4), gain(1, groups=4))
einsum("bthd,hd->bth", (2, 4), (2, 3, 2, 4), gain(2, groups=2))
einsum("bd,de->ebd", (4, 3), (5, 4), Of("w", channels=(0,)))  # d is a block dimension
einsum("bd,de->eb", (4, 3), (5, 4), Of("w", channels=(0,)))
einsum("a b, b c -> a c", (4, 3), (5, 4))
einsum("bd,d->bd", (1,), (5, 4), Of("w", channels=()))
case("einsum in a list", lambda p, x: torch.einsum("bi,io->bo", [x, p.w]), (4, 3), (5, 4))
case("einsum by numbers", lambda p, x: torch.einsum(x, [0, 1], p.w, [1, 2], [0, 2]), (4, 3), (5, 4))

# --- experts -------------------------------------------------------------------------------------


def experts(*ends: int) -> Callable[[], list[Tensor]]:
    return lambda: [torch.randn(9, 4, dtype=torch.float64), torch.tensor(ends, dtype=torch.int32)]


case("grouped_mm", lambda p, x, offs: grouped_mm(x, p.w, offs=offs), (3, 4, 2), experts(4, 4, 9))
case(
    "grouped_mm-tail",
    lambda p, x, offs: grouped_mm(x, p.w, offs=offs)[: int(offs[-1])],
    (3, 4, 2),
    experts(1, 5, 6),
    Of("w", part=lambda z: torch.cat([z, z.new_zeros(3, 2)])),
)

# --- convolutions --------------------------------------------------------------------------------

_CONV = Of("w", "b", channels=(1,))


def conv(
    name: str, shape: tuple[int, ...], x: tuple[int, ...], use: Of = _CONV, **how: Any
) -> None:
    dims = len(shape) - 2
    transposed = how.pop("transposed", False)
    function = getattr(F, f"conv_transpose{dims}d" if transposed else f"conv{dims}d")
    outputs = shape[1] * how.get("groups", 1) if transposed else shape[0]
    shapes = {"w": shape, "b": (outputs,)} if use.bias else {"w": shape}
    case(name, lambda p, x: function(x, p.w, p.values.get("b"), **how), shapes, x, use)


conv(
    "conv1d",
    (4, 2, 3),
    (2, 4, 7),
    replace(_CONV, groups=2, one_pass=False),
    stride=2,
    padding=2,
    dilation=2,
    groups=2,
)
conv("conv1d-same", (3, 2, 4), (2, 2, 5), padding="same")
conv("conv2d", (3, 2, 2, 3), (2, 2, 4, 4), stride=(1, 2), padding=(1, 0))
conv("conv2d-unbatched", (3, 2, 1, 3), (2, 4, 4), Of("w", channels=(0,)), padding=(0, 2))
conv("conv2d-1x1", (3, 2, 1, 1), (2, 2, 3, 3))
conv(
    "conv2d-depthwise",
    (4, 1, 3, 3),
    (2, 2, 4, 4),
    replace(_CONV, groups=2, one_pass=False),
    groups=2,
)
case(
    "conv2d-channels-last",
    lambda p, x: F.conv2d(x.to(memory_format=torch.channels_last), p.w, padding=1, dilation=(1, 2)),
    (3, 2, 2, 2),
    (2, 2, 4, 4),
    Of("w", channels=(1,)),
)
conv("conv3d", (2, 2, 2, 1, 2), (2, 2, 3, 2, 3), Of("w", channels=(1,)), padding=1, stride=2)
conv(
    "conv_transpose1d", (2, 3, 3), (2, 2, 4), transposed=True, stride=2, padding=1, output_padding=1
)
conv("conv_transpose1d-cut", (2, 3, 2), (2, 2, 4), transposed=True, padding=2, stride=3)
conv(
    "conv_transpose2d",
    (4, 2, 2, 3),
    (2, 4, 3, 2),
    replace(_CONV, groups=2, one_pass=False),
    transposed=True,
    stride=(2, 1),
    padding=(0, 1),
    groups=2,
)
conv(
    "conv_transpose3d",
    (2, 2, 2, 1, 2),
    (1, 2, 2, 2, 2),
    transposed=True,
    stride=(1, 2, 2),
    output_padding=(0, 1, 0),
    dilation=(2, 1, 1),
)

# --- normalisers ---------------------------------------------------------------------------------

_GB = {"w": (4,), "b": (4,)}


def normaliser(
    name: str,
    call: Callable[..., Tensor],
    x: tuple[int, ...],
    channels: tuple[int, ...],
    shapes: Mapping[str, tuple[int, ...]] = _GB,
) -> None:
    size = torch.Size(shapes["w"]).numel()
    use = Of("w", "b" if "b" in shapes else None, channels, groups=size, one_pass=False)
    case(name, call, shapes, x, use)


normaliser("layer_norm", lambda p, x: F.layer_norm(x, (4,), p.w, p.b), (2, 3, 4), (-1,))
normaliser(
    "layer_norm-two-dims",
    lambda p, x: F.layer_norm(x, (3, 4), p.w),
    (2, 5, 3, 4),
    (-2, -1),
    {"w": (3, 4)},
)
normaliser("rms_norm-eps", lambda p, x: F.rms_norm(x, (4,), p.w), (2, 3, 4), (-1,), {"w": (4,)})
normaliser("rms_norm", lambda p, x: F.rms_norm(x, (4,), p.w, 1e-3), (2, 3, 4), (-1,), {"w": (4,)})
normaliser("group_norm", lambda p, x: F.group_norm(x, 2, p.w, p.b), (2, 4, 3), (1,))
normaliser("batch_norm", lambda p, x: F.batch_norm(x, None, None, p.w, p.b, True), (3, 4, 2), (1,))
normaliser(
    "batch_norm-running",
    lambda p, x: F.batch_norm(x, x[0, :, 0] * 0 + 0.1, x[0, :, 0] ** 2, p.w, p.b),
    (3, 4, 2),
    (1,),
)
normaliser("instance_norm", lambda p, x: F.instance_norm(x, weight=p.w, bias=p.b), (2, 4, 3), (1,))

# --- gains ---------------------------------------------------------------------------------------

case("mul", lambda p, x: x * p.w, (4,), (2, 3, 4), gain(-1, groups=4))
case("mul-scalar", lambda p, x: x * p.w, (), (2, 3), gain(groups=1))
case("mul-channels-first", lambda p, x: x * p.w, (3, 1, 1), (2, 3, 2, 2), gain(1, groups=3))
case("mul-several-dims", lambda p, x: x * p.w, (3, 1, 2), (2, 3, 4, 2), gain(1, 3, groups=6))
case("mul-larger-than-data", lambda p, x: p.w * x, (5, 4), (4,), gain(0, 1, groups=20))
case("mul-by-mask", lambda p, x: p.w * (x > 0), (4,), (2, 3, 1), gain(-1, groups=4))
case(
    "addcmul",
    lambda p, x, y: torch.addcmul(y, x, p.w),
    (4,),
    randn((2, 3, 4), (2, 3, 4)),
    gain(-1, groups=4),
)
case(
    "addcmul-all",
    lambda p, x: torch.addcmul(p.b, p.w, x),
    _GB,
    (2, 3, 4),
    constant(-1, name="b"),
    gain(-1, groups=4),
)
case(
    "addcmul-in-place",
    lambda p, x, y: y.addcmul_(x, p.w),
    (4,),
    randn((2, 3, 4), (2, 3, 4)),
    gain(-1, groups=4),
    overwrites=True,
)
case("prelu", lambda p, x: F.prelu(x, p.w), (4,), (2, 4, 3), gain(1, groups=4))
case("prelu-one", lambda p, x: F.prelu(x, p.w), (1,), (2, 4), gain(groups=1))

# --- offsets -------------------------------------------------------------------------------------

case("add", lambda p, x: x + p.w, (4,), (2, 3, 4), constant(-1))
case("add-in-place", lambda p, x: x.add_(p.w), (4,), (2, 3, 4), constant(-1), overwrites=True)
case("add-positions", lambda p, x: x + p.w, (3, 4), (2, 3, 4))
case("add-positions-first", lambda p, x: x + p.w, (1, 4, 2, 3), (2, 4, 2, 3))

# --- tokens --------------------------------------------------------------------------------------


def mask(*shape: int) -> Callable[[], list[Tensor]]:
    return lambda: [
        torch.randn(2, 3, 4, dtype=torch.float64),
        torch.arange(torch.Size(shape).numel()).reshape(shape) % 3 == 1,
    ]


def masked(z: Tensor) -> Tensor:
    """Select the positions that the parameter fills; it affects no other rows."""
    return z * mask(2, 3)()[1][..., None]


def written(x: Tensor, index: Any, value: Tensor, *, copy: bool = True) -> Tensor:
    x = x * 1.0 if copy else x
    x[index] = value
    return x


case(
    "expand",
    lambda p, x: torch.cat([p.w.expand(2, -1, -1), x], 1),
    (1, 1, 4),
    (2, 3, 4),
    constant(-1, part=lambda z: z[:, :1]),
)
case(
    "repeat",
    lambda p, x: torch.cat([p.w.repeat(2, 1, 1), x], 1),
    (1, 2, 4),
    (2, 3, 4),
    Of("w", part=lambda z: z[:, :2]),
)
case("cat", lambda p, x: torch.cat([x, p.w], 0), (2, 4), (3, 4), Of("w", part=lambda z: z[3:]))
case("set-mask", lambda p, x, m: written(x, m, p.w), (4,), mask(2, 3), constant(-1, part=masked))
case(
    "set-mask-of-view",
    lambda p, x, m: written(
        (x.contiguous() * 1.0).view(3, 2, 4).transpose(0, 1), m, p.w, copy=False
    ),
    (4,),
    mask(2, 3),
    constant(-1, part=masked),
)

# --- look-ups ------------------------------------------------------------------------------------


def tokens(*shape: int, below: int = 5) -> Callable[[], list[Tensor]]:
    return lambda: [torch.randint(below, shape)]


def bags(*offsets: int) -> Callable[[], list[Tensor]]:
    return lambda: [torch.tensor([1, 2, 1, 4, 0, 3, 3]), torch.tensor(offsets)]


def bags_of_three() -> list[Tensor]:
    return [torch.tensor([[1, 2, 1], [4, 0, 4], [3, 3, 3], [0, 1, 2]])]


def shares_of_three() -> list[Tensor]:
    return [*bags_of_three(), torch.randn(4, 3, dtype=torch.float64)]


def but_token_1(z: Tensor) -> Tensor:
    return z * (bags_of_three()[0] != 1)[..., None]


case("embedding", lambda p, i: F.embedding(i, p.w), (5, 3), tokens(2, 4))
case(
    "embedding-padding",
    lambda p, i: F.embedding(i, p.w, -4),
    (5, 3),
    bags_of_three,
    Of("w", part=but_token_1),
)
case("index", lambda p, i: p.w[i], (5, 3), tokens(2, 4))
case("index-negative", lambda p, i: p.w[i - 5], (5, 3, 2), tokens(4), Of("w", channels=(1, 2)))

case("embedding_bag", lambda p, i: F.embedding_bag(i, p.w), (5, 3), bags_of_three)
case("embedding_bag-sum", lambda p, i: F.embedding_bag(i, p.w, mode="sum"), (5, 3), bags_of_three)
case(
    "embedding_bag-shares",
    lambda p, i, s: F.embedding_bag(i, p.w, mode="sum", per_sample_weights=s),
    (5, 3),
    shares_of_three,
)
case("embedding_bag-offsets", lambda p, i, o: F.embedding_bag(i, p.w, o), (5, 3), bags(0, 3, 3, 4))
case(
    "embedding_bag-padding",
    lambda p, i: F.embedding_bag(i, p.w, padding_idx=-5),
    (5, 3),
    bags_of_three,
)
