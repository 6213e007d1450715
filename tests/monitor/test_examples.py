"""The short examples as users run them: they learn, and every layer is measured."""

import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("lightning.fabric")
from accelerate.state import AcceleratorState, GradientState

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run in a temporary folder, for runs/, and reset Accelerate's settings, which are global."""
    monkeypatch.chdir(tmp_path)
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def run(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return capsys.readouterr().out


def tables(text: str) -> dict[int, list[str]]:
    """Return step → paths of the layers in its table, for steps that measure all layers."""
    found: dict[int, list[str]] = {}
    for block in text.split("step ")[1:]:
        step, said, *table = re.split(r" · |\n", block)
        assert said == "100% of the trained parameters measured"
        rule = next(i for i, line in enumerate(table) if line.startswith("──"))
        rows = (re.match(r"(\S+) +\d+ ", line) for line in table[rule + 1 :])
        found[int(step)] = [row[1] for row in rows if row]
    return found


@pytest.mark.slow(one_in=3)
@pytest.mark.parametrize(
    ("name", "steps", "layers"),
    [
        ("plain_loop", [0, 100, 200], ["0", "2", "4"]),
        ("accelerate_loop", [0, 80, 160, 240, 320], ["embed", "norm", "hidden", "output"]),
        ("fabric_loop", [0, 40, 80], ["0", "1", "3", "7"]),
    ],
)
def test_loops(
    name: str, steps: list[int], layers: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    text = run(name, capsys)
    assert tables(text) == dict.fromkeys(steps, layers)
    assert float(re.findall(r"Loss (\d\.\d+)", text)[-1]) < 0.3


@pytest.mark.slow
def test_hugging_face_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    text = run("hugging_face_trainer", capsys)
    found = tables(text.split("After step")[0])
    assert list(found) == [0, 50, 100]
    assert len(found[100]) == 22
    assert {"bert.encoder.layer.1.attention.self.key", "classifier"} <= set(found[100])
    told = dict(re.findall(r"^After step (\d+): (.*)$", text, flags=re.MULTILINE))
    assert re.fullmatch(r"adiv\.summary/update_cosine_median 0\.\d+", told["101"])
    assert float(told["150"].removeprefix("eval_loss ")) < 0.4


def test_what_if(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run("what_if", capsys).splitlines()
    assert lines[0] == "to affine-like: 2 swapped, 0 left"
    table = {tuple(line.split()[:2]): line.split()[2:] for line in lines[5:]}
    measures = ("update_cosine", "scale_cv", "effective_lr")
    assert list(table) == [(path, measure) for path in "02" for measure in measures]
    for path in "02":
        before, after = map(float, table[path, "scale_cv"])
        assert before > 0.5 and after == 0
        before, after = map(float, table[path, "effective_lr"])
        assert 0 < after < before / 10


def test_every_example_is_tried() -> None:
    tried = {"plain_loop", "accelerate_loop", "fabric_loop", "hugging_face_trainer", "demo"}
    tried |= {"what_if"}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == tried
