"""Attributes of torch that are replaced while a monitor has something on a model."""

import weakref
from typing import Any

_holders: set["weakref.ref[Any]"] = set()
_attributes: list[tuple[Any, str, Any, Any]] = []  # owner, name, usual value, value meanwhile


def replace_meanwhile(owner: Any, name: str, value: Any) -> None:
    """Replace an attribute while there are holders; if other code has set it, leave it alone."""
    _attributes.append((owner, name, getattr(owner, name), value))


def hold(holder: object) -> None:
    """Replace the attributes until this holder releases them, or is garbage-collected."""
    _holders.add(weakref.ref(holder, _gone))
    _settle()


def release(holder: object) -> None:
    """Restore the attributes if there is no other holder; after an interrupt, call it again."""
    _gone(weakref.ref(holder))


def _gone(holder: "weakref.ref[Any]") -> None:
    _holders.discard(holder)
    _settle()


def _settle() -> None:
    for owner, name, usual, other in _attributes:
        before, after = (usual, other) if _holders else (other, usual)
        if getattr(owner, name) is before:
            setattr(owner, name, after)
