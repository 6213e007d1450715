"""The text of Python's standard library, as numbers: it is on every machine that runs this."""

import hashlib
import os
import platform
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

VOCABULARY = 96  # end of line, and ASCII's printable characters
PRINTABLE = range(32, 127)


class Text(NamedTuple):
    """Characters as numbers from 0 to 95.

    Attributes:
        train: (characters,), int64.
        held_out: to choose learning rates by.
        test: to report.
        source: what the text is.
        sha256: of all of it, which differs between versions of Python.
    """

    train: Tensor
    held_out: Tensor
    test: Tensor
    source: str
    sha256: str


def load(characters: int) -> Text:
    """The beginning of the library's modules by name; its end is held out, and tested on.

    Args:
        characters: how many in all; a twentieth is held out, and a twentieth tested on.

    Raises:
        ValueError: the library is shorter.
    """
    pieces, length = [], 0
    for file in sorted(Path(os.__file__).parent.glob("*.py")):
        pieces.append(file.read_text(encoding="utf-8"))
        length += len(pieces[-1])
        if length > 1.1 * characters:
            break
    source = f"Python {platform.python_version()}'s standard library, {characters:,} characters"
    return split("".join(pieces), characters, source)


def split(written: str, characters: int, source: str) -> Text:
    """Numbers of a text's beginning, in three parts.

    Args:
        written: the text; characters that are not ASCII are left out.
        characters: how many.
        source: what it is.

    Raises:
        ValueError: the text is shorter.
    """
    known = {"\n": 0} | {chr(code): i for i, code in enumerate(PRINTABLE, start=1)}
    numbers = [known[c] for c in written if c in known][:characters]
    if len(numbers) < characters:
        raise ValueError(f"got {len(numbers):,} characters, expected at least {characters:,}.")
    whole, twentieth = torch.tensor(numbers), characters // 20
    return Text(
        *(whole[: -2 * twentieth], whole[-2 * twentieth : -twentieth], whole[-twentieth:]),
        *(source, hashlib.sha256(bytes(numbers)).hexdigest()),
    )


def batch(part: Tensor, rows: int, length: int, generator: torch.Generator) -> Tensor:
    """Pieces from random places, (rows, length + 1): inputs and, one further, targets."""
    starts = torch.randint(len(part) - length, (rows, 1), generator=generator)
    return part[starts + torch.arange(length + 1)]
