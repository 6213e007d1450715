"""Data classes as nested plain data and strict JSON, and settings without their secrets."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
# Names of what is always secret; of what is, if it looks like a code; and of sizes.
_SECRET = re.compile(
    r"pass(word|wd|phrase)|pwd|secret|credential|authorization|(api|access|private)_?key", re.I
)
_MAY_BE = re.compile(r"token|key|auth|bearer|cookie|pass|" + _SECRET.pattern, re.I)
_SIZE = re.compile(r"(dim|len|length|size|count|num)s?$", re.I)
_CODE = re.compile(r"(?=.*\d)(?=.*[a-z])[\w.:/+=~-]{16,}", re.I)


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

    What is named like a password, secret, credential or API key is always hidden, unless it is
    empty, true or false, or a number that is a size (`secret_dim`). Under a name with `token`,
    `key`, `auth`, `bearer`, `cookie` or `pass`, text is hidden if it looks like a code: 16 or more
    letters and digits without a space. So `pad_token`, `label_key` and `max_tokens` stay.
    """
    return {
        name: HIDDEN if _is_secret(str(name), value) else _inside(value)
        for name, value in values.items()
    }


def hidden_keys(values: Any) -> list[str]:
    """Return the names of the values that were hidden, also in nested values."""
    if isinstance(values, Mapping):
        hidden = [n for n, x in values.items() if x == HIDDEN and _MAY_BE.search(str(n))]
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
    if _SECRET.search(name):
        is_size = isinstance(value, int | float) and _SIZE.search(name)
        return not (is_size or value is None or isinstance(value, bool) or value == "")
    return bool(_MAY_BE.search(name)) and _holds_code(value)


def _holds_code(value: Any) -> bool:
    if isinstance(value, Mapping | list | tuple):
        return any(map(_holds_code, value.values() if isinstance(value, Mapping) else value))
    text = value.decode(errors="replace") if isinstance(value, bytes) else value
    return isinstance(text, str) and _CODE.fullmatch(text) is not None
