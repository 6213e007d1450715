"""A text file as sequences of tokens."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from adiv_monitor.audit.options.usage import UsageError
from adiv_monitor.audit.sources.shapes import Inputs


def examples(
    file: str, inputs: Inputs, tokenizer: Callable[[str], list[int]] | None
) -> tuple[TensorDataset, int]:
    """Return pieces of the text with the last token of each, and the number of tokens.

    A piece is one token longer than the model's inputs. The number of different tokens is one more
    than the largest token. Without a tokenizer each different byte of the file is a token, numbered
    from 0.

    Raises:
        UsageError: The model takes no tokens, or fewer different ones; or the file can't be read or
            is too short.
    """
    where = f"--data text:{file}"
    if inputs.vocabulary is None or len(inputs.shape) != 1:
        raise UsageError(
            f"{where}: the model takes {inputs}, expected one that takes a sequence of tokens"
        )
    try:
        content = Path(file).read_bytes()
    except OSError as error:
        raise UsageError(f"{where}: can't be read: {error.strerror}") from error
    if tokenizer is None:
        _, tokens = torch.unique(torch.tensor(list(content)), return_inverse=True)
    else:
        tokens = torch.tensor(tokenizer(content.decode("utf-8", "replace")), dtype=torch.long)
    different = int(tokens.max()) + 1 if len(tokens) else 0
    if different > inputs.vocabulary:
        raise UsageError(
            f"{where}: has {different} different tokens, the model's vocabulary is "
            f"{inputs.vocabulary}; give it a larger one by --model-args"
        )
    length = inputs.shape[0] + 1
    pieces = tokens[: len(tokens) // length * length].reshape(-1, length)
    if len(pieces) == 0:
        raise UsageError(f"{where}: has {len(tokens)} tokens, expected at least {length}")
    return TensorDataset(pieces, pieces[:, -1]), different
