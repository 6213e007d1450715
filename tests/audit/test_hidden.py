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
from adiv_monitor.audit.options.config import Config, load
from adiv_monitor.diagnosis.hidden import HIDDEN, hidden_keys, without_secrets

HERE = "audit.command_models"
SHORT = ("--input-shape", "64", "--steps", "2", "--no-try")
SECRETS: dict[str, Any] = {
    "api_key": "s3cret",
    "apiKey": "s3cret",
    "OPENAI_API_KEY": "s3cret",
    "apikey": "s3cret",
    "token": "s3cret",
    "hf_token": "s3cret",
    "auth-token": "s3cret",
    "accessToken": "s3cret",
    "password": "s3cret",
    "db.password": "s3cret",
    "passwd": "s3cret",
    "pwd": "s3cret",
    "secret": "s3cret",
    "client_secret": ["s3cret"],
    "aws_secret_access_key": "s3cret",
    "credentials": {"user": "s3cret", "pin": 1},
    "private_key": "s3cret",
    "passphrase": "s3cret",
    "password_file": "s3cret",
    "tokens": ["s3cret"],
    "authorization": "s3cret",
    "use_auth_token": "s3cret",
    "use_token": "s3cret",
    "image_api_token": "s3cret",
    "text_access_token": "s3cret",
    "auth_token_text": "s3cret",
    "token_hf": "s3cret",
    "hf_token_1": "s3cret",
    "auth": "Bearer s3cret",
    "basic_auth": {"user": "u", "header": ["s3cret"]},
    "bearer": "s3cret",
    "wandb_key": "s3cret",
    "openaiKey": "s3cret",
    "ssh_key": b"s3cret",
    "account-key": "s3cret",
    "passcode": "s3cret",
    "pass": "s3cret",
    "db_pass": "s3cret",
    "session_cookie": "s3cret",
    "password_len": "s3cret",
}
NONE_OF_THEM: dict[str, Any] = {
    "max_tokens": 512,
    "num_tokens": 8,
    "token_dim": 64,
    "pad_token_id": 0,
    "tokens": [1, 2],
    "token": 3,
    "token_type": "bpe",
    "token_pooling": "mean",
    "tokenizer": "gpt2",
    "key": "k",
    "pad_token": "<pad>",
    "bos_token": "<s>",
    "additional_special_tokens": ["<a>"],
    "lr": 0.1,
    "class_token": "cls",
    "mask_token": "[MASK]",
    "key_dim": 8,
    "kv_keys": "k",
    "use_token": True,
    "password": None,
    "token_": None,
    "api_key": "",
    "hidden": "***",
    "keys": ["a"],
    "x": "y",
    "secret": False,
    "passing": "word",
    "monkey": "m",
    "api": "x",
    "access": "y",
    "secret_dim": 64,
    "password_len": 8,
    "api_key_size": 32,
    "query_token": "<q>",
    "new_token": "<n>",
    "use_auth_token": True,
    "use_key": True,
    "sort_key": "length",
    "label_key": "labels",
    "num_keys": 4,
    "key_size": "large",
    "hash_key": 7,
    "forward_pass": "full",
    "passes": "two",
    "auth": None,
    "pass": 2,
}


@pytest.mark.parametrize("key", SECRETS)
def test_what_looks_like_a_secret_is_hidden(key: str) -> None:
    for given in (
        {key: SECRETS[key]},
        {"inside": {key: SECRETS[key]}},
        {"of": [{key: SECRETS[key]}]},
    ):
        assert "s3cret" not in str(without_secrets(given))
        assert len(hidden_keys(without_secrets(given))) == 1
        assert without_secrets(without_secrets(given)) == without_secrets(given)


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
            self.param_groups[0]["api_key"] = "s3cret"

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
    given = json.dumps({"width": 5, "api_key": "s3cret", "max_tokens": 8})
    return [f"{HERE}:with_key", "--model-args", given, *SHORT]


@pytest.mark.filterwarnings("default")
def test_no_file_of_an_audit_has_it(audited: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*audited, "--out", "out"]) == 0
    assert command_models.calls[-1] == "s3cret", "the model has it"
    files = [file for file in Path("out").rglob("*") if file.is_file()]
    assert len(files) == 5 and not [f for f in files if b"s3cret" in f.read_bytes()]
    printed = capsys.readouterr()
    assert "s3cret" not in printed.out + printed.err
    config = Config(**load("out/config.yaml"))
    assert config.model_args == {"width": 5, "api_key": HIDDEN, "max_tokens": 8}
    again = [audited[0], "--config", "out/config.yaml", "--out", "again"]
    assert main(again) == 2
    told = capsys.readouterr().err
    assert "api_key" in told and "--model-args" in told and told.count("\n") == 1
    assert not Path("again").exists()
    assert main([*again, *audited[1:3]]) == 0
