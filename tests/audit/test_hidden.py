"""Secrets among arguments reach no file; arguments that only look like secrets do."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from audit import command_models
from audited import mlp, seen
from torch import nn

from adiv_monitor.audit.command.cli import main
from adiv_monitor.audit.command.options import Config, load, read
from adiv_monitor.report.plain import HIDDEN, hidden_keys, without_secrets

HERE = "audit.command_models"
SHORT = ("--input-shape", "64", "--steps", "2", "--no-try")
VALUE = "s3cret-0123456789"
NAMES = ("api_key OPENAI_API_KEY hf_token accessToken db.password pwd private_key use_auth_token "
         "hf_token_1 bearer account-key db_pass session_cookie")  # fmt: skip
SECRETS: dict[str, Any] = {
    **dict.fromkeys(NAMES.split(), VALUE),
    "client_secret": [VALUE],
    "basic_auth": {"user": "u", "header": [VALUE]},
    "ssh_key": VALUE.encode(),
}
OTHERS = "token_type tokenizer key pad_token monkey passes sort_key label_key key_size forward_pass"
SIZES = "max_tokens pad_token_id token key_dim secret_dim password_len api_key_size hash_key pass"
NONE_OF_THEM: dict[str, Any] = {
    **dict.fromkeys(OTHERS.split(), "observation.images.top"),
    **dict.fromkeys(SIZES.split(), 8),
    **dict.fromkeys(("use_token", "use_key"), True),
    **dict.fromkeys(("password", "auth"), None),
    "tokens": [1, 2],
    "keys": ["a"],
    "api_key": "",
    "hidden": "***",
}


@pytest.mark.parametrize("key", SECRETS)
def test_what_looks_like_a_secret_is_hidden(key: str) -> None:
    for given in ({key: SECRETS[key]}, {"of": [{key: SECRETS[key]}]}):
        hidden = without_secrets(given)
        assert VALUE not in str(hidden) and len(hidden_keys(hidden)) == 1
        assert without_secrets(hidden) == hidden


@pytest.mark.parametrize("number", [1234, 0, 1.5])
def test_a_number_may_be_a_password_but_no_token(number: float) -> None:
    found = without_secrets({"password": number, "token": number, "api_key": number})
    assert found == {"password": HIDDEN, "token": number, "api_key": HIDDEN}


@pytest.mark.parametrize("key", NONE_OF_THEM)
def test_what_is_no_secret_stays(key: str) -> None:
    given = {key: NONE_OF_THEM[key], "inside": {key: NONE_OF_THEM[key]}}
    assert without_secrets(given) == given
    assert hidden_keys(given) == []


def test_settings_of_optimizers_hide_them() -> None:
    class Logged(torch.optim.SGD):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, lr=0.1)
            self.param_groups[0]["api_key"] = "s3cret-0123456789"

    def logged(model: nn.Module) -> torch.optim.Optimizer:
        return Logged(model.parameters())

    settings = seen(mlp(), optimizer=logged, steps=2).facts.settings
    assert settings["api_key"] == HIDDEN and settings["lr"] == 0.1


@pytest.fixture
def audited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    for package in ("rich", "yaml", "jinja2", "matplotlib", "tensorboard"):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    command_models.calls.clear()
    given = json.dumps({"width": 5, "api_key": "s3cret-0123456789", "max_tokens": 8})
    return [f"{HERE}:with_key", "--model-args", given, *SHORT]


@pytest.mark.filterwarnings("default")
def test_no_file_of_an_audit_has_it(audited: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*audited, "--out", "out"]) == 0
    assert command_models.calls[-1] == "s3cret-0123456789", "the model has it"
    files = [file for file in Path("out").rglob("*") if file.is_file()]
    assert len(files) == 5 and not [f for f in files if b"s3cret-0123456789" in f.read_bytes()]
    printed = capsys.readouterr()
    assert "s3cret-0123456789" not in printed.out + printed.err
    config = Config(**load("out/config.yaml"))
    assert config.model_args == {"width": 5, "api_key": HIDDEN, "max_tokens": 8}
    again = [audited[0], "--config", "out/config.yaml", "--out", "again"]
    assert main(again) == 2
    told = capsys.readouterr().err
    assert "api_key" in told and "--model-args" in told and told.count("\n") == 1
    assert not Path("again").exists()
    assert read([*again, *audited[1:3]], "")[0].model_args == json.loads(audited[2])
