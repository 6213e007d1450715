"""Readings of models agree with the definitions, computed by hand from unfolded inputs."""

import copy
import math
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import Tied
from computes import Computes
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

from adiv_monitor.alignment import Alignment, Probe, log_alignment
from adiv_monitor.errors import AdivError


def perturbed(model: nn.Module) -> nn.Module:
    """Return a copy with weights as after some training."""
    moved = copy.deepcopy(model)
    for p in moved.parameters():
        p.data += 0.3 * torch.randn_like(p) * p.abs().mean()
    return moved


def move(model: nn.Module, to: nn.Module) -> None:
    with torch.no_grad():
        for p, new in zip(model.parameters(), to.parameters(), strict=True):
            p.copy_(new)


def inputs(model: nn.Module, module: nn.Module, x: Tensor) -> Tensor:
    """Return the inputs with which a module is called."""
    seen: list[Tensor] = []
    handle = module.register_forward_pre_hook(lambda m, args: seen.append(args[0].detach().clone()))
    with torch.no_grad():
        model.eval()(x)
    handle.remove()
    return seen[0]


def read(model: nn.Module, x: Tensor, **probe: Any) -> tuple[nn.Module, nn.Module, Any]:
    """Return copies of the model before and after a move, and the readings after it."""
    before, after = copy.deepcopy(model), perturbed(model)
    alignment = Alignment(model, Probe(x, **probe))
    move(model, after)
    return before, after, alignment.read()


def expected(
    W0: Tensor, W: Tensor, z0: Tensor, z: Tensor, ratio: Any = log_alignment, prefix: str = ""
) -> dict[str, float | None]:
    terms = {"alpha": (W - W0, z0), "omega": (W0, z - z0), "u": (W - W0, z - z0)}
    terms["cumulative"] = W, z
    return {f"{prefix}{name}": ratio(*term) for name, term in terms.items()}


def spectral(weight: Tensor, z: Tensor) -> float | None:
    bound = torch.linalg.matrix_norm(weight, 2) * z.norm()
    return float((z @ weight.t()).norm() / bound) if bound else None


def weights_and_inputs(before: Any, after: Any, i: int, x: Tensor) -> tuple[Tensor, ...]:
    """Return W0, W, z0 and z of a part of two models."""
    weights = (model[i].weight.detach() for model in (before, after))
    return *weights, *(inputs(model, model[i], x) for model in (before, after))


def check(reading: object, values: dict[str, float | None]) -> None:
    for name, value in values.items():
        found = getattr(reading, name)
        assert (found is None) == (value is None), name
        assert value is None or found == pytest.approx(value, abs=1e-9), name


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(20, 32), nn.ReLU(inplace=True), nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, 3)
    ).double()


def test_linear_layers() -> None:
    x = torch.randn(16, 20, dtype=torch.float64)
    before, after, readings = read(mlp(), x, spectral=True)
    assert list(readings) == ["0", "2", "4"]
    for path in readings:
        W0, W, z0, z = weights_and_inputs(before, after, int(path), x)
        check(readings[path], expected(W0, W, z0, z))
        check(readings[path], expected(W0, W, z0, z, spectral, "spectral_"))
        y, y0 = z @ W.t(), z0 @ W0.t()
        assert readings[path].output_rms == pytest.approx(y.square().mean().sqrt())
        assert readings[path].output_change_rms == pytest.approx((y - y0).square().mean().sqrt())
    assert readings["0"].omega is None  # the first layer's input never changes
    assert readings["0"].u is None
    assert [r.role for r in readings.values()] == ["embedding", "hidden", "readout"]
    assert [r.fan_in for r in readings.values()] == [20, 32, 24]
    _, _, plain = read(before, x)
    for path, reading in plain.items():
        assert not any(name.startswith("spectral") for name in reading.measures())
        assert reading.measures().keys() < readings[path].measures().keys()


CONVOLUTIONS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1d": (lambda: nn.Conv1d(6, 8, 3, stride=2, padding=1), (6, 11)),
    "2d": (lambda: nn.Conv2d(6, 8, (3, 2), stride=2, padding=(1, 0), dilation=(2, 1)), (6, 9, 8)),
    "3d": (lambda: nn.Conv3d(6, 8, 2, padding=1), (6, 4, 3, 5)),
    "circular": (lambda: nn.Conv2d(6, 8, 3, padding=1, padding_mode="circular"), (6, 5, 5)),
    "pointwise": (lambda: nn.Conv2d(20, 8, 1), (20, 5, 5)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_against_products_with_patches(name: str) -> None:
    build, shape = CONVOLUTIONS[name]
    first = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[len(shape) - 1](shape[0], shape[0], 1)
    model = nn.Sequential(first, build(), nn.Flatten(), nn.LazyLinear(3)).double()
    x = torch.randn(4, *shape, dtype=torch.float64)
    model(x)
    before, after, readings = read(model, x, max_rows=None)
    reading = readings["1"]

    def patches(of: nn.Module) -> Tensor:
        """Return patches (rows, fan-in) by a convolution with one-hot kernels."""
        z, conv = inputs(of, of[1], x), of[1]
        n = conv.weight[0].numel()
        pick = copy.deepcopy(conv)
        pick.weight = nn.Parameter(torch.eye(n, dtype=z.dtype).view(n, *conv.weight.shape[1:]))
        pick.bias = None
        return pick(z).detach().movedim(1, -1).reshape(-1, n)

    W0, W = before[1].weight.detach().flatten(1), after[1].weight.detach().flatten(1)
    check(reading, expected(W0, W, patches(before), patches(after)))
    assert reading.fan_in == W.shape[1]
    # The patches' RMS as defined, by a convolution of the squares.
    z = inputs(after, after[1], x)
    squares = copy.deepcopy(after[1])
    squares.weight = nn.Parameter(torch.full_like(squares.weight, 1 / reading.fan_in))
    squares.bias = None
    rms = squares(z.square()).mean().sqrt()
    assert patches(after).square().mean().sqrt() == pytest.approx(rms.item(), rel=1e-12)


def test_groups_of_a_convolution_never_align_above_one() -> None:
    """The RMS is taken per group: over all, one active group of eight would give 1.37."""
    model = nn.Sequential(nn.Conv1d(16, 16, 1), nn.Conv1d(16, 8, 8, groups=8), nn.Flatten())
    model.append(nn.Linear(8, 2))
    nn.init.zeros_(model[1].weight)
    nn.init.ones_(model[1].weight[:1])
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.zero_()[:2] = 1
    alignment = Alignment(model, Probe(torch.ones(2, 16, 8)))
    reading = alignment.read()["1"]
    assert reading.fan_in == 16
    assert reading.cumulative == pytest.approx(1, abs=1e-6)


def attends(m: nn.Module, x: Tensor) -> Tensor:
    hidden = m.embed(x)
    return m.head(hidden + m.attend(hidden, hidden, hidden)[0])


def test_projections_of_attention() -> None:
    x = torch.randn(3, 5, 10, dtype=torch.float64)
    parts = {"embed": nn.Linear(10, 24), "head": nn.Linear(24, 3)}
    model = Computes(attends, attend=nn.MultiheadAttention(24, 2, batch_first=True), **parts)
    before, after, readings = read(model.double(), x, max_rows=None)
    names = [f"attend.{part}" for part in ("q", "k", "v", "out_proj")]
    assert list(readings) == ["embed", *names, "head"]
    z0, z = ((of.embed(x)).detach().flatten(0, 1) for of in (before, after))
    for i, name in enumerate(names[:3]):
        W0, W = (of.attend.in_proj_weight.detach().chunk(3)[i] for of in (before, after))
        check(readings[name], expected(W0, W, z0, z))
        assert readings[name].predecessors == ("embed",)
    assert set(readings["attend.out_proj"].predecessors) == set(names[:3])
    assert set(readings["head"].predecessors) == {"embed", "attend.out_proj"}


def test_tied_weights_are_a_layer_each_time() -> None:
    x = torch.randint(11, (4, 7))
    before, after, readings = read(Tied(11, 20).double(), x, max_rows=None)
    assert [r.role for r in readings.values()] == ["embedding", "hidden", "readout"]
    assert list(readings) == ["embed", "middle", "head"]
    assert readings["embed"].alpha is None
    assert (readings["embed"].fan_in, readings["embed"].fan_out) == (11, 20)
    change = after.embed(x) - before.embed(x)
    assert readings["embed"].output_change_rms == pytest.approx(
        change.square().mean().sqrt().item()
    )
    z0, z = (torch.tanh(m.middle(m.embed(x))).detach().flatten(0, 1) for m in (before, after))
    W0, W = (model.embed.weight.detach() for model in (before, after))
    check(readings["head"], expected(W0, W, z0, z))
    of_layers = {x.path: x.parameters[0] for x in Alignment(after, Probe(x)).layers}
    assert of_layers["embed"] is of_layers["head"] is after.embed.weight


def test_rows_are_chosen_once() -> None:
    x = torch.randn(500, 20, dtype=torch.float64)
    before, after, readings = read(mlp(), x, max_rows=100)
    reading = readings["2"]
    assert reading.rows == 100
    for name, value in expected(*weights_and_inputs(before, after, 2, x)).items():
        assert getattr(reading, name) == pytest.approx(value, abs=0.03)
        assert getattr(reading, name) != value


def test_a_sliding_reference_compares_with_some_readings_ago() -> None:
    model, x = mlp(), torch.randn(6, 20, dtype=torch.float64)
    models = [copy.deepcopy(model)]
    alignment = Alignment(model, Probe(x, window=2))
    for count in range(1, 5):
        models.append(perturbed(models[-1]))
        move(model, models[-1])
        reading = alignment.read()["2"]
        before, after = models[max(0, count - 2)], models[-1]
        check(reading, expected(*weights_and_inputs(before, after, 2, x)))


def test_a_resumed_run_is_compared_with_the_same_point() -> None:
    model, x = mlp(), torch.randn(6, 20, dtype=torch.float64)
    alignment = Alignment(model, Probe(x))
    state = copy.deepcopy(alignment.state_dict())
    move(model, perturbed(model))
    resumed = Alignment(model, Probe(x))
    assert resumed.read()["2"].alpha is None
    resumed.load_state_dict(state)
    assert resumed.read() == alignment.read()
    with pytest.raises(ValueError, match="another probe"):
        Alignment(model, Probe(x + 1)).load_state_dict(state)
    with pytest.raises(ValueError, match="another probe, expected the same batch, seed and max"):
        Alignment(model, Probe(x, seed=1)).load_state_dict(state)
    with pytest.raises(ValueError, match=r"other layers, expected .* chooses: '0', '2'$"):
        Alignment(model, Probe(x, layers=["0", "2"])).load_state_dict(state)


class Streams(nn.Module):
    """Two inputs, a residual sum, a product, a concatenation, two heads and a small side branch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(4, 16)
        self.block, self.gate = nn.Linear(16, 16), nn.Linear(16, 16)
        self.squeeze, self.excite = nn.Linear(16, 2), nn.Linear(2, 16)
        self.heads = nn.ModuleList([nn.Linear(32, 3), nn.Linear(32, 1)])
        self.unused = nn.Linear(5, 5)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        a, b = self.a(x), self.b(y)
        stream = a + torch.tanh(self.block(a))
        gated = torch.sigmoid(self.gate(b)) * b
        gated = gated * self.excite(self.squeeze(b))
        both = torch.cat([stream, gated], 1)
        return tuple(head(both) for head in self.heads)


def test_who_feeds_whom_and_roles() -> None:
    model = Streams()
    alignment = Alignment(model, Probe({"x": torch.randn(4, 8), "y": torch.randn(4, 4)}))
    fed = {layer.path: set(layer.predecessors) for layer in alignment.layers}
    assert fed["a"] == fed["b"] == set()
    assert (fed["block"], fed["gate"], fed["excite"]) == ({"a"}, {"b"}, {"squeeze"})
    assert fed["heads.0"] == fed["heads.1"] == {"a", "block", "b", "gate", "excite"}
    roles = {layer.path: layer.role for layer in alignment.layers}
    assert roles == {
        **dict.fromkeys(("a", "b"), "embedding"),
        **dict.fromkeys(("block", "gate", "squeeze"), "hidden"),
        "excite": "excluded",
        **dict.fromkeys(("heads.0", "heads.1"), "readout"),
    }
    assert alignment.unmeasured == ["unused.weight"]


def test_roles_are_overridable() -> None:
    batch = (torch.randn(4, 8), torch.randn(4, 4))
    roles = {"exc*": "hidden", "block": "excluded", "squeeze": "embedding"}
    alignment = Alignment(Streams(), Probe(batch, roles=roles))
    layers = {layer.path: layer for layer in alignment.layers}
    assert all(layers[p.replace("*", "ite")].role == role for p, role in roles.items())
    assert layers["squeeze"].predecessors == ()
    for wrong, message in (
        ({"a": "hidden"}, "can't be hidden"),
        ({"a": "readout"}, "can't be readout"),
        ({"gate": "readout"}, "feeds and is fed by others"),
        ({"a": "queen"}, "expected one of"),
        ({"z*": "hidden"}, "fits no layer"),
    ):
        with pytest.raises(ValueError, match=message):
            Alignment(Streams(), Probe(batch, roles=wrong))


def test_layers_that_are_left_out_are_looked_through() -> None:
    alignment = Alignment(mlp(), Probe(torch.randn(3, 20).double(), layers=["0", "4"]))
    assert [(layer.path, layer.predecessors) for layer in alignment.layers] == [
        ("0", ()),
        ("4", ("0",)),
    ]
    with pytest.raises(AdivError, match="among 0, 2, 4"):
        Alignment(mlp(), Probe(torch.randn(3, 20).double(), layers=["9"]))
    with pytest.raises(AdivError, match="shows no layer"):
        Alignment(mlp(), Probe(torch.randn(3, 20).double(), layers=lambda path, module: False))


def test_other_samples_than_at_the_reference_are_refused() -> None:
    shorter = lambda m, x: m.linear(x[: len(x) - int(m.linear.bias[0] > 1)])  # noqa: E731
    model = Computes(shorter, linear=nn.Linear(4, 4))
    alignment = Alignment(model, Probe(torch.randn(6, 4)))
    nn.init.constant_(model.linear.bias, 2)
    with pytest.raises(AdivError, match="same samples"):
        alignment.read()


def test_weights_that_the_training_caches_stay_its_own() -> None:
    """`parametrize.cached()` around a step: no reading takes its weights, or leaves others."""
    model = nn.Sequential(weight_norm(nn.Linear(4, 3)), nn.Linear(3, 2))
    alignment = Alignment(model, Probe(torch.randn(8, 4)))
    with parametrize.cached():
        held = model[0].weight
        alignment.read()
        assert model[0].weight is held and held.requires_grad
    assert model[0].weight is not held


def test_the_forward_pass_is_that_of_evaluation() -> None:
    """The forward pass is in evaluation mode: no dropout, and the running statistics.

    Otherwise two readings could not be compared.
    """
    model = nn.Sequential(
        nn.Linear(20, 32), nn.BatchNorm1d(32), nn.Dropout(0.5), nn.Linear(32, 3)
    ).double()
    x = torch.randn(16, 20, dtype=torch.float64) + 3
    assert model.training
    alignment = Alignment(model, Probe(x, max_rows=None))
    readings = alignment.read()
    assert all(reading.output_change_rms == 0 for reading in readings.values())
    z = model.eval()[:3](x)
    expected_rms = (z @ model[3].weight.t()).square().mean().sqrt().item()
    assert readings["3"].output_rms == pytest.approx(expected_rms)


def test_autocast_and_a_mode_of_inference_do_not_reach_it() -> None:
    model, x = mlp().float(), torch.randn(6, 20)  # autocast would round these
    alignment = Alignment(model, Probe(x))
    move(model, perturbed(model))
    plain = alignment.read()
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        assert alignment.read() == plain


@pytest.mark.parametrize("where", ["weight", "probe"])
def test_what_is_not_finite_leaves_the_other_layers_readings(where: str) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 4))
    x = torch.randn(8, 16)
    if where == "probe":
        x[3] = math.nan
    alignment = Alignment(model, Probe(x, spectral=True))
    move(model, perturbed(model))
    if where == "weight":
        with torch.no_grad():
            model[2].weight[0, 0] = math.nan
    readings = alignment.read()
    assert (readings["0"].alpha is None) is (where == "probe")
    assert readings["2"].alpha is None and readings["2"].spectral_alpha is None
    assert readings["3"].omega is None and readings["3"].spectral_omega is None
    assert log_alignment(torch.zeros(4, 3), torch.zeros(0, 3)) is None


def test_a_probe_takes_a_mapping_of_any_kind_and_a_single_pattern() -> None:
    """As the encodings of Hugging Face's tokenizers are."""
    parts = {"first": nn.Linear(16, 16), "last": nn.Linear(16, 4)}
    model = Computes(lambda m, x: m.last(m.first(x)), **parts)
    probe = Probe(UserDict(x=torch.randn(8, 16)), layers="la*")
    assert [layer.path for layer in Alignment(model, probe).layers] == ["last"]


def test_what_a_probe_can_not_be() -> None:
    x = torch.randn(4, 20).double()
    for given, error in (
        ({"batch": 3}, TypeError),
        ({"batch": x, "window": 0}, ValueError),
        ({"batch": x, "max_rows": True}, ValueError),
    ):
        with pytest.raises(error, match="Probe"):
            Probe(**given)
    with pytest.raises(TypeError, match=r"got Tensor, expected a Probe: Probe\(batch\)"):
        Alignment(mlp(), x)
    with pytest.raises(TypeError, match="the model's arguments alone, without targets"):
        Alignment(mlp(), Probe((x, torch.zeros(4))))
