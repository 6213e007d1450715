"""Arguments of the commands: numbers, devices and folders, and what `--quick` stands for."""

import argparse
from pathlib import Path
from typing import Any

import torch


def count(given: str) -> int:
    """A whole number of at least 1.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    if not given.isdecimal() or int(given) < 1:
        raise argparse.ArgumentTypeError(f"{given!r} is not a whole number of at least 1")
    return int(given)


def rate(given: str) -> float:
    """A number above 0.

    Raises:
        ValueError, argparse.ArgumentTypeError: it is none.
    """
    if not 0 < float(given) < float("inf"):
        raise argparse.ArgumentTypeError(f"{given!r} is not a number above 0")
    return float(given)


def device(given: str) -> str:
    """A device that torch can use here.

    Raises:
        argparse.ArgumentTypeError: it can't.
    """
    try:
        torch.empty(1, device=given)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise argparse.ArgumentTypeError(f"{given!r} can't be used here: {reason}") from error
    return given


def folder(given: str) -> Path:
    """A folder, or a place where one can be made.

    Raises:
        argparse.ArgumentTypeError: a file is there.
    """
    if Path(given).exists() and not Path(given).is_dir():
        raise argparse.ArgumentTypeError(f"{given!r} is a file, not a folder")
    return Path(given)


def parsed(parser: argparse.ArgumentParser, **quick: Any) -> argparse.Namespace:
    """The arguments; with `--quick`, those of these that are not given are small."""
    given = parser.parse_args()
    if given.quick:
        parser.set_defaults(**quick)
        given = parser.parse_args()
    return given
