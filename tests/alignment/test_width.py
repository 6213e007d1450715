"""Slopes over width, of known numbers and of networks with known theory."""

import math
import sys
from pathlib import Path

import pytest
import torch
from torch import nn, optim

pytest.importorskip("scipy")

from width import Experiment, main
from width_slopes import slope

from adiv_monitor import Monitor
from adiv_monitor.alignment import Probe
from adiv_monitor.max_lr import optimizer_groups, parametrize_model
from adiv_monitor.sinks import JsonlSink

X = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
Y = X[:, :4]


def experiment(width: int, seed: int, name: str | None = None) -> Experiment:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4)
    )
    probe = Probe(X, max_rows=None)
    groups: object = model.parameters()
    if name is not None:
        layers = parametrize_model(model, probe, name)
        groups = optimizer_groups(model, layers, name, "adam", lr=0.05)
    optimizer = optim.Adam(groups, lr=0.005)

    def step() -> None:
        optimizer.zero_grad()
        (model(X) - Y).square().mean().backward()
        optimizer.step()

    return Experiment(model, step, probe)


def mup(width: int, seed: int) -> Experiment:
    return experiment(width, seed, "mup")


def test_a_power_has_its_exponent() -> None:
    found = slope([(n, 3 * n**0.7) for n in (10, 20, 80)])
    assert found.value == pytest.approx(0.7)
    assert found.half == pytest.approx(0, abs=1e-6)
    assert found.verdict == "grows"
    assert slope([(n, n**-0.5) for n in (10, 20, 80)]).verdict == "vanishes"
    assert slope([(n, 2 * n**0.05) for n in (10, 20, 80)]).verdict == "stays"
    two = slope([(10, 1.0), (20, 2.0)])
    assert (two.value, two.half, two.verdict) == (pytest.approx(1), math.inf, "unclear")
    assert slope([(10, 1.0), (10, 2.0)]) is None
    assert slope([(10, 0.0), (20, 2.0)]) is None


def test_the_command_by_a_function_and_by_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setitem(sys.modules, "my_widths", sys.modules[__name__])
    picture = tmp_path / "widths.png"
    options = ["--widths", "64", "256", "--steps", "2", "--seeds", "2", "--plot", str(picture)]
    main(["my_widths:mup", *options])
    shown = capsys.readouterr().out
    assert shown.splitlines()[0].startswith("after step 2;")
    rows = [line.split()[:2] for line in shown.splitlines()[2:]]
    assert [path for path, _ in rows] == ["0", "2", "4"]
    assert {verdict for _, verdict in rows} <= {"stays", "unclear"}  # from two seeds
    assert picture.stat().st_size > 10_000

    files = []
    for width in (64, 128, 256):
        built = mup(width, 0)
        optimizer = optim.SGD(built.model.parameters(), lr=0.0)  # only counts steps
        file = tmp_path / f"{width}.jsonl"
        with Monitor(
            built.model, optimizer, every_n_steps=1, alignment=built.probe, sinks=[JsonlSink(file)]
        ):
            for _ in range(2):
                built.model(X).square().mean().backward()
                optimizer.step()
                built.step()
        files.append(f"{width}={file}")
    main(["--runs", *files])
    assert capsys.readouterr().out.splitlines()[3].split()[0] == "2"
