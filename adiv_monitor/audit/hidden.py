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
_KEYS = frozenset({"api", "access", "private", "secret", "signing", "encryption", "auth"})
# Whose tokens are those of a text or a picture.
_VOCABULARY = frozenset(
    {
        *{"pad", "padding", "bos", "eos", "sot", "eot", "cls", "class", "sep", "mask", "unk"},
        *{"unknown", "begin", "start", "end", "stop", "special", "prefix", "suffix", "image"},
        *{"audio", "video", "text", "word", "register", "dist", "use"},
    }
)


def without_secrets(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values by name, those that look like secrets as `***`, also where they lie deeper.

    By the words of the name: a password, secret, credential or API key is hidden whatever it is,
    unless it is empty, true or false; a token if it is text and not one of a vocabulary. So
    `max_tokens`, `token_dim`, `pad_token` and `pad_token_id` stay.
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
    pairs = pairwise(words)
    if _SECRETS & set(words) or any(a in _KEYS and b in ("key", "keys") for a, b in pairs):
        return not (value is None or isinstance(value, bool) or value == "")
    is_token = words[-1:] and words[-1].endswith(("token", "tokens"))
    return bool(is_token) and not _VOCABULARY & set(words) and _holds_text(value)


def _holds_text(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_text, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_text, value))
    return isinstance(value, str | bytes) and bool(value)
