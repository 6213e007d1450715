"""Data classes as nested plain data and strict JSON, and settings without their secrets."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from itertools import pairwise
from typing import Any

from adiv_monitor.report import StepReport

HIDDEN = "***"
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_SECRETS = frozenset(
    ("password", "passwords", "passwd", "pwd", "passphrase", "secret", "secrets", "credential")
).union(("credentials", "authorization", "apikey", "apikeys"))
# Last words of names: text is secret under the first ones, and a number is a size under the second.
_TEXTS = frozenset(("auth", "bearer", "cookie", "cookies", "pass", "passcode", "key"))
_SIZES = frozenset(("dim", "dims", "len", "length", "size", "count", "num"))
_KEYS = frozenset(("api", "access", "private", "secret", "signing", "encryption", "auth"))
# Words beside which a token grants access.
_DOORS = _KEYS | {"hf", "huggingface", "hub", "github", "gitlab", "wandb", "openai"}
# Words of tokens in a text or a picture, of keys of a batch, and of passes through a network.
_VOCABULARY = frozenset(
    ("pad", "padding", "bos", "eos", "sot", "eot", "cls", "class", "sep", "mask", "unk", "unknown")
).union(
    ("begin", "start", "end", "stop", "special", "prefix", "suffix", "image", "audio", "video"),
    ("text", "word", "register", "dist", "query", "new", "input", "output", "target", "label"),
    ("batch", "feature", "loss", "sort", "forward", "backward"),
)


def to_plain(value: Any) -> Any:
    """Convert to dictionaries with text keys, lists, numbers, texts, booleans and None."""
    if isinstance(value, StepReport):
        return value.to_dict(quantiles=True)
    if is_dataclass(value):
        return {f.name: to_plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    return value


def to_json(value: Any) -> str:
    """Return strict JSON; numbers that are not finite become "NaN", "Infinity" or "-Infinity"."""
    return json.dumps(strict(value, nan="NaN"), allow_nan=False, separators=(",", ":"))


def strict(value: Any, *, nan: str | None) -> Any:
    """Replace every float that JSON lacks in nested data; `nan` stands for NaN."""
    if isinstance(value, dict):
        return {key: strict(item, nan=nan) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item, nan=nan) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return nan if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def without_secrets(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values by name, with apparent secrets replaced by `***`, also in nested values.

    The words of the name decide. A password, secret, credential or API key is always hidden, unless
    it is empty, true or false, or a number that is a size (`secret_dim`). A name that ends in
    `token`, `_key`, `auth`, `bearer`, `cookie`, `pass` or `passcode` is hidden if the value is
    text, unless other words show that it belongs to a text, a picture or a batch. So `max_tokens`,
    `token_dim`, `pad_token`, `label_key` and `key` stay. `auth`, `api` and `access` beside `token`
    take precedence over such words: `image_api_token` is hidden.
    """
    return {
        name: HIDDEN if _is_secret(str(name), value) else _inside(value)
        for name, value in values.items()
    }


def hidden_keys(values: Any) -> list[str]:
    """Return the names of the values that were hidden, also in nested values."""
    if isinstance(values, Mapping):
        hidden = [str(n) for n, x in values.items() if x == HIDDEN and _is_secret(str(n), x)]
        return hidden + hidden_keys([*values.values()])
    return [n for x in values for n in hidden_keys(x)] if isinstance(values, list | tuple) else []


def _inside(value: Any) -> Any:
    if isinstance(value, Mapping):
        return without_secrets(value)
    if isinstance(value, list | tuple):
        found = map(_inside, value)
        return list(found) if isinstance(value, list) else tuple(found)
    return value


def _is_secret(name: str, value: Any) -> bool:
    words = [word.lower() for word in _WORDS.findall(name)]
    pairs = list(pairwise(words))
    if _SECRETS & set(words) or any(a in _KEYS and b in ("key", "keys") for a, b in pairs):
        is_size = words[-1] in _SIZES and isinstance(value, int | float)
        return not (is_size or value is None or isinstance(value, bool) or value == "")
    opens = any({a, b} & {"token", "tokens"} and {a, b} & _DOORS for a, b in pairs)
    if not words or ((_VOCABULARY & set(words) or words == ["key"]) and not opens):
        return False
    of_text = words[-1] in _TEXTS or words[-1].endswith(("token", "tokens"))
    return (opens or of_text) and _holds_text(value)


def _holds_text(value: Any) -> bool:
    items = value.values() if isinstance(value, Mapping) else value
    if isinstance(value, Mapping | list | tuple):
        return any(map(_holds_text, items))
    return isinstance(value, str | bytes) and bool(value)
