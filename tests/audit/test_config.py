"""Options: one meaning, whether the command line or a YAML file gives them."""

import math
import tempfile
from pathlib import Path
from typing import Any

import pytest

from adiv_monitor.audit.command.code import UsageError
from adiv_monitor.audit.command.options import Config, dumped, load, parsed, read

pytest.importorskip("yaml")

ALL = Config(
    model="a.b:c",
    run_script=True,
    model_args={"width": 3, "names": ["é"]},
    input_shape=(3, 32, 32),
    num_classes=10,
    optimizer_args={"lr": 1e-5, "momentum": 0.9},
    clip_norm=1e-3,
    precision="bf16-mixed",
    try_fixes=False,
    fail_if=["scale_cv > 1", "act"],
)


def load_text(text: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "c.yaml").write_text(text, encoding="utf-8")
        return load(f"{folder}/c.yaml")


@pytest.mark.parametrize("config", [ALL, Config(model="a:b")])
def test_a_written_config_reads_back(config: Config) -> None:
    assert Config(**load_text(dumped(config))) == config


def test_a_file_does_not_say_whom_to_trust() -> None:
    config = Config("a:b", trust_checkpoint=True, force=True, config="c.yaml")
    assert not {"trust_checkpoint", "force", "config"} & load_text(dumped(config)).keys()
    assert load_text("trust_checkpoint: true\nforce: true\nseed: 3\n") == {"seed": 3}


def test_values_of_yaml_are_those_of_the_command_line() -> None:
    text = "optimizer_args: {lr: 1e-3, eps: 1E+2, name: b}\nbatch-size: 4\nfail_if: act\n"
    given = {"lr": 1e-3, "eps": 100.0, "name": "b"}
    assert load_text(text) == {"optimizer_args": given, "batch_size": 4, "fail_if": ["act"]}
    assert load_text("input_shape: [3, 8]\nseed: null\ntry: false\nclip_norm: .inf\n") == {
        "input_shape": (3, 8),
        "try_fixes": False,
        "clip_norm": math.inf,
    }
    line = ["m", "--input-shape", "3,8", "--no-try", "--optimizer-args", '{"lr": 0.1}']
    assert parsed(line) == {
        "model": "m",
        "input_shape": (3, 8),
        "try_fixes": False,
        "optimizer_args": {"lr": 0.1},
    }


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("model: a:b\nloss: mse\nfail_if: [act, watch]\n")
    config, of_file = read(["c:d", "--config", str(file), "--fail-if", "note"], "")
    assert config == Config("c:d", loss="mse", fail_if=["note"], config=str(file))
    assert of_file == ["--loss"]


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("steps", "0", "--steps: got 0, expected an integer of at least 1"),
        ("input_shape", "a", "such as 3,64,64"),
        ("model_args", "\"{'a': 1}\"", "JSON"),
        ("precision", "16-mixed", "bf16-mixed"),
        ("download", '"yes"', "ignored explicit argument 'yes'"),
        ("fail_if", '["scale_cv >"]', "'scale_cv >': expected"),
        ("stepz", "3", "unrecognized arguments: --stepz=3"),
        ("model_args", "{api_key: '***'}", "--model-args: api_key: .* give this option anew"),
    ],
)
def test_a_wrong_value_says_what_is_expected(
    name: str, value: str, told: str, tmp_path: Path
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"model: m\n{name}: {value}\n")
    with pytest.raises(UsageError, match=told) as caught:
        read(["--config", str(file)], "")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("steps: [1", "c.yaml: while parsing"),
        ("- 1", r"got \[1\], expected lines such as"),
        ("", "got None, expected lines such as"),
        ("!!python/object/apply:os.system ['touch evil']", "could not determine a constructor"),
    ],
)
def test_a_wrong_file_is_told(content: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        load_text(content)
    assert not Path("evil").exists()
