"""The examples run at their smallest sizes."""

import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("scipy")
pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")

EXAMPLES = Path(__file__).parents[2] / "examples" / "alignment"
COMMANDS = {
    "landscape": ["--side", "3"],
    "data_noise": ["--steps", "20", "--seeds", "1"],
    "carried": ["--quick"],
    "discovery": ["--quick"],
    "how_often": ["--quick"],
    "spectral": ["--quick"],
    "grid": ["--quick", "--names", "mup"],
}


@pytest.mark.slow(one_in=7, first=5)
@pytest.mark.parametrize("name", COMMANDS)
def test_it_leaves_a_picture(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", [name, *COMMANDS[name], "--out", str(tmp_path)])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    (picture,) = tmp_path.glob("*.png")
    assert picture.stat().st_size > 10_000
    assert capsys.readouterr().out


def test_every_example_is_tried() -> None:
    own = {"width", "width_slopes", "width_plot", "logits"}  # test_width.py, test_logits.py
    assert {path.stem for path in EXAMPLES.glob("*.py")} - own == set(COMMANDS)
