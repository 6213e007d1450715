"""Options: one meaning, whether the command line or a YAML file gives them."""

import math
from dataclasses import fields
from pathlib import Path

import pytest

from adiv_monitor.audit.options.config import HELP, Config, dumped, load, read
from adiv_monitor.audit.options.usage import UsageError

pytest.importorskip("yaml")

ALL = Config(
    model="a.b:c",
    run_script=True,
    model_args={"width": 3, "names": ["é"]},
    checkpoint="weights.pt",
    trust_checkpoint=True,
    data="cifar10:/data",
    download=True,
    input_shape=(3, 32, 32),
    num_classes=10,
    batch_size=8,
    loss="mse",
    optimizer="SGD",
    optimizer_args={"lr": 1e-5, "momentum": 0.9},
    clip_norm=1e-3,
    steps=7,
    seed=3,
    device="cuda:1",
    precision="bf16-mixed",
    realised=True,
    attention=True,
    alignment=True,
    try_fixes=False,
    try_seconds=7.0,
    losses="metrics.csv",
    fail_if=("scale_cv > 1", "act"),
    out="elsewhere",
)


@pytest.mark.parametrize("config", [ALL, Config(model="a:b")])
def test_a_written_config_reads_back(config: Config, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(dumped(config), encoding="utf-8")
    assert Config(**load(str(file))) == config


def test_every_option_differs_somewhere_above() -> None:
    usual = Config()
    assert [f.name for f in fields(Config) if getattr(ALL, f.name) == getattr(usual, f.name)] == []


def test_numbers_of_yaml_without_a_point_are_numbers(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("optimizer_args: {lr: 1e-3, eps: 1E+2}\nbatch-size: 4\n")
    assert load(str(file)) == {"optimizer_args": {"lr": 1e-3, "eps": 100.0}, "batch_size": 4}


def test_text_of_the_command_line_becomes_values() -> None:
    given = {"input_shape": "3,8,8", "optimizer_args": '{"lr": 0.1}', "steps": "5", "try": False}
    given |= {"try_seconds": "inf"}
    values = read(given, str)
    assert values == {
        "input_shape": (3, 8, 8),
        "optimizer_args": {"lr": 0.1},
        "steps": 5,
        "try_fixes": False,
        "try_seconds": math.inf,
    }


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("steps", "0", "a whole number of at least 1"),
        ("steps", "1.5", "a whole number of at least 1"),
        ("steps", "inf", "a whole number of at least 1"),
        ("steps", True, "a whole number"),
        ("steps", [3], "a whole number"),
        ("batch_size", "-3", "at least 1"),
        ("seed", "-1", "at least 0"),
        ("clip_norm", "0", "above 0"),
        ("clip_norm", "nan", "above 0"),
        ("clip_norm", "inf", "finite"),
        ("try_seconds", "-1", "at least 0"),
        ("input_shape", "a", "such as 3,64,64"),
        ("input_shape", [3, 0], "such as 3,64,64"),
        ("model_args", "{'a': 1}", "JSON"),
        ("model_args", [1], "JSON"),
        ("precision", "16-mixed", "bf16-mixed"),
        ("device", 3, "text"),
        ("realised", "yes", "true or false"),
        ("fail_if", ["scale_cv >"], "fail_if: 'scale_cv >'"),
        ("stepz", "3", "did you mean steps"),
    ],
)
def test_a_wrong_value_says_what_is_expected(name: str, value: object, told: str) -> None:
    with pytest.raises(UsageError, match=told) as caught:
        read({name: value}, str)
    assert name in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("steps: [1", "is no YAML"),
        ("- 1", "holds a list"),
        ("", "holds a NoneType"),
        ("modle: x", "did you mean model"),
        ("!!python/object/apply:os.system ['touch evil']", "is no YAML"),
    ],
)
def test_a_wrong_file_is_told(
    content: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(content)
    with pytest.raises(UsageError, match=told):
        load("c.yaml")
    assert not Path("evil").exists()


def test_every_option_has_its_help() -> None:
    assert list(HELP) == [f.name for f in fields(Config)] and all(HELP.values())
