"""Parametrized models have the initialisation, multipliers and learning rates of the tables."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

pytest.importorskip("scipy")

from adiv_monitor.alignment import Alignment, Probe
from adiv_monitor.max_lr import (
    PARAMETRIZATIONS,
    MaxLRScheduler,
    optimizer_groups,
    parametrize_model,
    solve_max_lr,
)

H = 0.5


def mlp(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4)
    )


@pytest.mark.parametrize("name", PARAMETRIZATIONS)
def test_initialisation_and_multipliers(name: str) -> None:
    width, model = 256, mlp(256)
    parameters = list(model.parameters())
    parametrize_model(model, Probe(torch.randn(4, 8)), name, scale={"2": math.sqrt(2)})
    assert list(map(id, model.parameters())) != []
    assert {id(p) for p in model.parameters()} == {id(p) for p in parameters}
    chosen = PARAMETRIZATIONS[name]
    for i, (place, constant) in enumerate(((0, 8**-H), (2, math.sqrt(2)), (4, 1.0))):
        stored, used = parameters[2 * i], model[place].weight
        expected = constant * width ** -chosen.b[i]
        assert stored.std().item() == pytest.approx(expected, rel=0.1)
        torch.testing.assert_close(used, stored * width ** -chosen.a[i])
    # All four begin as the same function, but for the readout of muP and MFP.
    out = model(torch.randn(500, 8)).std().item()
    assert 0.02 < out < 2
    assert (out < 0.2) == (name in ("mup", "mfp"))


def test_groups_have_the_rates_of_the_table() -> None:
    width, model = 64, mlp(64)
    layers = parametrize_model(model, Probe(torch.randn(4, 8)), "mup")
    groups = optimizer_groups(model, layers, "mup", "adam", lr=0.1, eps=1e-8, gains={"2": 3.0})
    by_name = {group["name"]: group for group in groups}
    assert list(by_name) == ["0", "2", "4", "0.bias", "2.bias", "4.bias"]
    assert by_name["0"]["lr"] == pytest.approx(0.1 * width**-0.5)
    assert by_name["2"]["lr"] == pytest.approx(3 * 0.1 / width)
    assert by_name["4"]["lr"] == pytest.approx(0.1 * width**-0.5)
    assert by_name["0.bias"]["lr"] == pytest.approx(0.1 / 64)  # as hidden weights at a width of 64
    assert by_name["2"]["eps"] == pytest.approx(1e-8 / width)
    held = [id(p) for group in groups for p in group["params"]]
    assert sorted(held) == sorted(map(id, model.parameters()))
    optim.Adam(groups)
    rates = {g["name"]: g["lr"] for g in optimizer_groups(model, layers, "mup", "sgd", lr=0.1)}
    assert rates["2"] == pytest.approx(0.1)
    # Gradients of features are n^(-1), of an output of one; all learn alike at a width of 64.
    assert rates["0.bias"] == rates["2.bias"] == pytest.approx(0.1 * width / 64)
    assert rates["4.bias"] == 0.1


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("name", PARAMETRIZATIONS)
def test_at_the_base_width_nothing_changes(name: str, optimizer: str) -> None:
    torch.manual_seed(0)
    model, probe = mlp(64), Probe(torch.randn(4, 8))
    before = {place: copy.deepcopy(model[place]) for place in (0, 2, 4)}
    base = Alignment(mlp(64), probe).layers
    layers = parametrize_model(model, probe, name, base=base)
    for layer in layers:
        old, new = before[int(layer.path)], model[int(layer.path)]
        assert torch.equal(old.bias, new.bias)
        assert new.weight.std().item() == pytest.approx(old.weight.std().item(), rel=0.15)
        assert torch.equal(new.weight, layer.weights[0])
    groups = optimizer_groups(model, layers, name, optimizer, lr=0.1, base=base, eps=1e-8)
    assert {(group["lr"], group["eps"]) for group in groups} == {(0.1, 1e-8)}


def test_beyond_the_base_width_exponents_are_of_the_ratio() -> None:
    probe = Probe(torch.randint(50, (6, 5)))
    model, at_base = Tied(256), Tied(64)
    at_base.attend.out_proj.weight.data.zero_()
    base = Alignment(at_base, probe).layers
    layers = parametrize_model(model, probe, "mup", base=base)
    stored = model.embed.parametrizations.weight.original
    assert stored.std().item() == pytest.approx(4**-H, rel=0.05)
    torch.testing.assert_close(model.embed.weight, stored * 4**H)
    torch.testing.assert_close(model.head.weight, stored * 4**-H)
    spread = at_base.attend.in_proj_weight.std() / 2
    assert model.attend.in_proj_weight.std().item() == pytest.approx(spread.item(), rel=0.05)
    assert model.attend.out_proj.weight.count_nonzero() == 0  # as in the base
    adam = optimizer_groups(model, layers, "mup", "adam", lr=0.1, base=base, kinds={"vector": 0.5})
    rates = {group["name"]: group["lr"] for group in adam}
    assert rates["attend.q"] == pytest.approx(0.1 / 4)
    assert rates["embed"] == pytest.approx(0.1 * 4**-H)
    assert rates["norm.weight"] == rates["attend.out_proj.bias"] == 0.05
    kinds = {group["name"]: group["kind"] for group in adam}
    assert (kinds["embed"], kinds["attend.q"], kinds["norm.bias"]) == ("input", "hidden", "vector")
    sgd = optimizer_groups(model, layers, "mup", "sgd", lr=0.1, base=base)
    rates = {group["name"]: group["lr"] for group in sgd}
    assert rates["attend.q"] == pytest.approx(0.1)
    assert rates["norm.weight"] == pytest.approx(0.4)


def test_another_base_is_refused() -> None:
    model, probe = mlp(64), Probe(torch.randn(4, 8))
    base = Alignment(mlp(32), probe).layers
    short = Alignment(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)), probe).layers
    with pytest.raises(ValueError, match="'4' is a layer of one of the two models only"):
        parametrize_model(model, probe, "mup", base=short)
    layers = parametrize_model(model, probe, "mup", base=base)
    with pytest.raises(ValueError, match=r"'0' was parametrized as 2 times as wide .* is 64 times"):
        optimizer_groups(model, layers, "mup", "adam", lr=0.1)
    with pytest.raises(ValueError, match="'0' of the base has a multiplier"):
        optimizer_groups(model, layers, "mup", "adam", lr=0.1, base=layers)
    with pytest.raises(ValueError, match=r"kinds=….*got 'norm', expected names among input"):
        optimizer_groups(model, layers, "mup", "adam", lr=0.1, base=base, kinds={"norm": 1.0})


def test_mup_trains_alike_at_every_width() -> None:
    """The readout's change in a few steps of Adam; with SP and one rate it would grow ninefold."""
    x, y = torch.randn(64, 8), torch.randn(64, 4)

    def change(width: int, name: str | None) -> float:
        torch.manual_seed(0)
        model = mlp(width)
        groups: object = model.parameters()
        if name is not None:
            layers = parametrize_model(model, Probe(x), name)
            groups = optimizer_groups(model, layers, name, "adam", lr=0.1)
        optimizer = optim.Adam(groups, lr=0.01)
        before = model(x).detach()
        for _ in range(3):
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
        return (model(x) - before).square().mean().sqrt().item()

    assert 0.6 < change(1024, "mup") / change(64, "mup") < 1.6
    assert change(1024, None) / change(64, None) > 5


class Tied(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.attend = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.embed(tokens))
        return self.head(hidden + self.attend(hidden, hidden, hidden)[0])


@pytest.mark.parametrize("name", PARAMETRIZATIONS)
def test_shared_weights_have_one_initialisation_and_one_rate(name: str) -> None:
    model = Tied()
    tokens = torch.randint(50, (6, 5))
    layers = parametrize_model(model, Probe(tokens), name)
    groups = optimizer_groups(model, layers, name, "adam", lr=0.1)
    assert [g["name"] for g in groups[:3]] == ["embed", "attend.q", "attend.out_proj"]
    assert model.embed.weight.std().item() == pytest.approx(1, rel=0.1)  # a + b is 0 there
    stored = groups[0]["params"][0]
    chosen = PARAMETRIZATIONS[name]
    total = chosen.a[2] + chosen.b[2]
    ratio = model.head.weight / stored
    torch.testing.assert_close(ratio, torch.full_like(ratio, 64 ** -(total - chosen.b[0])))
    optimizer = optim.Adam(groups)
    model(tokens).sum().backward()
    optimizer.step()
    assert model.attend.in_proj_weight.shape == (192, 64)
    spread = model.attend.in_proj_weight.detach().std() * 64**0.5
    assert 0.7 < spread < 4


def convolution(dims: int, groups: Callable[[int], int]) -> Callable[[int], nn.Module]:
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    return lambda width: kind(width, width, 3, padding=1, groups=groups(width))


# Dimensions of the data, and a layer of this width.
GROUPED: dict[str, tuple[int, Callable[[int], nn.Module]]] = {
    **{f"depthwise {d}d": (d, convolution(d, lambda width: width)) for d in (1, 3)},
    "transposed": (1, lambda width: nn.ConvTranspose1d(width, width, 3, groups=width, padding=1)),
    "more groups": (1, convolution(1, lambda width: width // 8)),
}


def grouped(dims: int, layer: nn.Module, width: int) -> nn.Module:
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    first, last = kind(3, width, 1), nn.Linear(width, 4)
    pool = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)[dims - 1](1)
    mix = kind(width, width, 1)
    return nn.Sequential(first, layer, nn.ReLU(), mix, nn.ReLU(), pool, nn.Flatten(), last)


@pytest.mark.slow(one_in=7)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize(
    ("kind", "name"),
    [*((kind, "mup") for kind in GROUPED), *(("depthwise 1d", x) for x in ("sp", "ntk", "mfp"))],
)
def test_weights_whose_fan_in_stays_move_alike_at_every_width(
    kind: str, name: str, optimizer: str
) -> None:
    """The gradient shrinks as that of features does, so the rate of SGD grows."""
    dims, layer = GROUPED[kind]
    drawn = torch.Generator().manual_seed(0)
    x, y = torch.randn(8, 3, *(4,) * dims, generator=drawn), torch.arange(8) % 4
    probe = Probe(x)
    for based in (False, True):
        moves = []
        for width in (32, 256):
            torch.manual_seed(0)
            base = Alignment(grouped(dims, layer(32), 32), probe).layers if based else None
            model = grouped(dims, layer(width), width)
            layers = parametrize_model(model, probe, name, base=base)
            groups = optimizer_groups(model, layers, name, optimizer, lr=0.1, base=base, eps=1e-8)
            group = next(g for g in groups if g["name"].partition(".")[0] == "1")
            nn.functional.cross_entropy(model(x), y).backward()
            gradient = group["params"][0].grad.square().mean().sqrt().item()
            moves.append((group["lr"] * gradient, gradient / group["eps"]))
        (narrow, above), (wide, still_above) = moves
        assert 0.6 < still_above / above < 1.7
        if optimizer == "sgd":
            assert 0.6 < wide / narrow < 1.7


def test_matrices_that_the_probe_does_not_show_have_no_rate_but_a_given_one() -> None:
    model, probe = mlp(32), Probe(torch.randn(4, 8))
    model.register_parameter("aside", nn.Parameter(torch.randn(3, 4)))
    layers = Alignment(model, probe).layers
    with pytest.raises(ValueError, match=r"use aside the probe.*rates="):
        optimizer_groups(model, layers, "sp", "adam", lr=0.1)
    groups = optimizer_groups(
        model, layers, "sp", "adam", lr=0.1, rates={"aside": 0.3, "4.weight": 1}
    )
    rates = {g["name"]: g["lr"] for g in groups}
    assert (rates["aside"], rates["4.weight"]) == (0.3, 1)
    held = [id(p) for group in groups for p in group["params"]]
    assert sorted(held) == sorted(map(id, model.parameters()))
    model.aside.requires_grad_(False)
    assert "aside" not in {g["name"] for g in optimizer_groups(model, layers, "sp", "adam", lr=1)}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lr": "0.1"}, r"lr=….*got '0\.1', expected a number"),
        ({"lr": 0}, r"lr=….*got 0, expected a finite number above 0"),
        ({"lr": math.nan}, r"lr=….*got nan"),
        ({"lr": 0.1, "eps": -1.0}, r"eps=….*got -1\.0, expected a finite number above 0"),
        ({"lr": 0.1, "gains": {"2": None}}, r"gains\['2'\]=….*got None, expected a number"),
        ({"lr": 0.1, "alignments": {"3": None}}, r"alignments=….*got '3', expected names among 0"),
    ],
)
def test_what_is_no_learning_rate_or_factor_is_refused(given: Any, message: str) -> None:
    model = mlp(32)
    layers = Alignment(model, Probe(torch.randn(4, 8))).layers
    with pytest.raises((TypeError, ValueError), match=message):
        optimizer_groups(model, layers, "sp", "adam", **given)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_measured_alignments_change_exponents_and_nothing_at_the_base(optimizer: str) -> None:
    probe = Probe(torch.randn(64, 8))
    small, model = mlp(32), mlp(128)
    base = Alignment(mlp(32), probe).layers
    alignment = Alignment(small, probe)
    training = optim.SGD(small.parameters(), lr=0.1)
    for _ in range(3):
        training.zero_grad()
        small(torch.randn(64, 8)).square().mean().backward()
        training.step()
    readings = alignment.read()
    at_base = optimizer_groups(
        small, alignment.layers, "sp", optimizer, lr=0.1, base=base, alignments=readings
    )
    assert {g["lr"] for g in at_base} == {0.1}
    groups = optimizer_groups(
        *(model, Alignment(model, probe).layers, "sp", optimizer),
        lr=0.1,
        base=base,
        alignments=readings,
        eps=1e-8,
    )
    of_layers = [readings[path] for path in ("0", "2", "4")]
    solved = solve_max_lr(
        parametrization="sp",
        optimizer=optimizer,
        alpha=[r.alpha for r in of_layers],
        omega=[r.omega for r in of_layers],
        u=[r.u and min(max(r.u, H), 1.0) for r in of_layers],
    )
    full = solve_max_lr(parametrization="sp", optimizer=optimizer, layers=3)
    assert solved.c[1] < full.c[1]
    found = [g["lr"] for g in groups[:3]]
    assert found == pytest.approx([0.1 * 4**-c for c in solved.c])
    assert [g["eps"] for g in groups[:3]] == pytest.approx([1e-8 * 4**-g for g in solved.gradients])


def test_multipliers_of_another_parametrization_or_none_are_refused() -> None:
    """As when parametrize_model was forgotten; a `Parametrization` may be the model's own code."""
    model, probe = mlp(32), Probe(torch.randn(4, 8))
    layers = parametrize_model(model, probe, "mup")
    message = (
        r"the weight of '2' is multiplied by n\^0, with parametrization='mfp' expected by n\^-0.5"
    )
    roles = {"0": "excluded"}
    with pytest.raises(ValueError, match=r"the weight of '0' is multiplied by n\^0\.5"):
        optimizer_groups(model, layers, "sp", "adam", lr=0.1)
    with pytest.raises(ValueError, match=r"the weight of '0' is multiplied by n\^0\.5"):
        MaxLRScheduler(optim.Adam(model.parameters()), model, probe, parametrization="sp")
    of_the_model = MaxLRScheduler(optim.Adam(model.parameters()), model, probe)
    assert of_the_model.c_full == {"0": H, "2": 1, "4": H}
    other = mlp(32)
    parametrize_model(other, Probe(probe.batch, roles=roles), "mup")
    with pytest.raises(ValueError, match=message):
        layers = Alignment(other, Probe(probe.batch, roles=roles)).layers
        optimizer_groups(other, layers, "mfp", "adam", lr=0.1)
    plain = mlp(32)
    layers = Alignment(plain, probe).layers
    with pytest.raises(ValueError, match=r"'0' is multiplied by n\^0, with parametrization='mup'"):
        optimizer_groups(plain, layers, "mup", "adam", lr=0.1)
    groups = optimizer_groups(plain, layers, PARAMETRIZATIONS["mup"], "adam", lr=0.1)
    assert groups[1]["lr"] == pytest.approx(0.1 / 32)


def test_rate_times_decay_is_the_same_in_every_group() -> None:
    """Weights shrink equally at every width, as in mup's optimizers."""
    model, probe = mlp(64), Probe(torch.randn(4, 8))
    base = Alignment(mlp(16), probe).layers
    layers = parametrize_model(model, probe, "mup", base=base)

    def groups(optimizer: object) -> list[dict[str, Any]]:
        return optimizer_groups(
            *(model, layers, "mup", optimizer), lr=0.1, base=base, weight_decay=0.02
        )

    rates = {group["lr"] for group in groups(optim.AdamW)}
    assert len(rates) == 3
    for optimizer in (optim.AdamW, "sgd"):
        products = [group["lr"] * group["weight_decay"] for group in groups(optimizer)]
        assert products == pytest.approx([0.002] * len(products))
    for coupled in (optim.Adam, optim.RMSprop(model.parameters())):
        with pytest.raises(ValueError, match=r"weight_decay=….*part of the gradient"):
            groups(coupled)
    decoupled = optim.Adam(model.parameters(), decoupled_weight_decay=True)
    assert groups(decoupled)[0]["weight_decay"] > 0


@pytest.mark.skipif(not hasattr(optim, "Muon"), reason="torch has no Muon yet")
def test_muon_beside_adamw() -> None:
    """One optimizer has hidden matrices, another the rest, each with a schedule of its own."""
    model, probe = mlp(64), Probe(torch.randn(8, 8), max_rows=None)
    groups = optimizer_groups(model, Alignment(model, probe).layers, "sp", "muon", lr=0.02)
    by_name = {group["name"]: group["lr"] for group in groups}
    assert by_name["2"] == pytest.approx(0.02 * 64**-H)  # updates of unit spectral norm
    muon = optim.Muon([group for group in groups if group["kind"] == "hidden"])
    others = optim.AdamW([group for group in groups if group["kind"] != "hidden"])
    options = {"mode": "dynamic", "rule": "muon", "every_n_steps": 1, "warm_up": 0}
    schedules = [MaxLRScheduler(each, model, probe, **options) for each in (muon, others)]
    for _ in range(3):
        model(torch.randn(8, 8)).square().mean().backward()
        for each in (muon, others):
            each.step()
    assert [schedule.failures for schedule in schedules] == [0, 0]
    assert muon.param_groups[0]["lr"] == by_name["2"]
    # Both measure the whole model, the first one before the other's step.
    assert schedules[0].latest.c == pytest.approx(schedules[1].latest.c, abs=0.05)


def test_groups_for_another_optimizer_are_refused() -> None:
    model, probe = mlp(64), Probe(torch.randn(8, 8))
    groups = optimizer_groups(model, Alignment(model, probe).layers, "sp", "adam", lr=0.1)
    with pytest.raises(ValueError, match=r"groups of 'adam'.*rule of SGD is 'sgd'"):
        MaxLRScheduler(optim.SGD(groups), model, probe)
    MaxLRScheduler(optim.AdamW(groups), model, probe)
