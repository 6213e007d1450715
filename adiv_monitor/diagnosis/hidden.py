"""Secrets among arguments and settings, which no file of an audit keeps."""

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

HIDDEN = "***"
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_SECRETS = frozenset(
    {
        *{"password", "passwords", "passwd", "pwd", "passphrase", "secret", "secrets"},
        *{"credential", "credentials", "authorization", "apikey", "apikeys"},
    }
)
# What text under a name that ends so is secret, and what number under one that ends so is none.
_TEXTS = frozenset({"auth", "bearer", "cookie", "cookies", "pass", "passcode", "key"})
_SIZES = frozenset({"dim", "dims", "len", "length", "size", "count", "num"})
_KEYS = frozenset({"api", "access", "private", "secret", "signing", "encryption", "auth"})
# Beside which a token is one that lets in.
_DOORS = _KEYS | {"hf", "huggingface", "hub", "github", "gitlab", "wandb", "openai"}
# Whose tokens are those of a text or a picture, whose keys are those of a batch, and whose passes
# are those through a network.
_VOCABULARY = frozenset(
    {
        *{"pad", "padding", "bos", "eos", "sot", "eot", "cls", "class", "sep", "mask", "unk"},
        *{"unknown", "begin", "start", "end", "stop", "special", "prefix", "suffix", "image"},
        *{"audio", "video", "text", "word", "register", "dist", "query", "new", "input", "output"},
        *{"target", "label", "batch", "feature", "loss", "sort", "forward", "backward"},
    }
)


def without_secrets(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values by name, those that look like secrets as `***`, also where they lie deeper.

    By the words of the name: a password, secret, credential or API key is hidden whatever it is,
    unless it is empty, true or false, or the number is a size (`secret_dim`). What ends in `token`,
    `_key`, `auth`, `bearer`, `cookie`, `pass` or `passcode` is hidden if it is text, unless other
    words say that it belongs to a text, a picture or a batch. So `max_tokens`, `token_dim`,
    `pad_token`, `label_key` and `key` stay. `auth`, `api` and `access` beside `token` tell more
    than such words: `image_api_token` is hidden.
    """
    return {
        name: HIDDEN if _is_secret(str(name), value) else _inside(value)
        for name, value in values.items()
    }


def hidden_keys(values: Mapping[str, Any]) -> list[str]:
    """The names of those that were hidden."""
    return list(_hidden(values))


def _inside(value: Any) -> Any:
    if isinstance(value, Mapping):
        return without_secrets(value)
    if isinstance(value, list | tuple):
        found = map(_inside, value)
        return list(found) if isinstance(value, list) else tuple(found)
    return value


def _hidden(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            if item == HIDDEN and _is_secret(str(name), item):
                yield str(name)
            else:
                yield from _hidden(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _hidden(item)


def _is_secret(name: str, value: Any) -> bool:
    words = [word.lower() for word in _WORDS.findall(name)]
    pairs = list(pairwise(words))
    if _SECRETS & set(words) or any(a in _KEYS and b in ("key", "keys") for a, b in pairs):
        is_size = words[-1] in _SIZES and isinstance(value, int | float)
        return not (is_size or value is None or isinstance(value, bool) or value == "")
    return _names_secret_text(words, pairs) and _holds_text(value)


def _names_secret_text(words: list[str], pairs: list[tuple[str, str]]) -> bool:
    if any({a, b} & {"token", "tokens"} and {a, b} & _DOORS for a, b in pairs):
        return True
    if not words or _VOCABULARY & set(words) or words == ["key"]:
        return False
    return words[-1] in _TEXTS or words[-1].endswith(("token", "tokens"))


def _holds_text(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_text, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_text, value))
    return isinstance(value, str | bytes) and bool(value)
