"""Reported bugs that hide from a model the order of its inputs, or some of them."""

from collections.abc import Callable

import torch
from audit.fault_benchmark import data, healthy, networks, reported_kinds
from audit.fault_benchmark.run import Healthy, Run, case
from computes import Computes
from torch import Tensor, nn
from torch.optim import AdamW

WORDS, LENGTH, TOPICS = 12, 8, 4


class Read(nn.Module):
    """A GRU's output at one place; an image's rows are its places."""

    def __init__(self, place: int = -1) -> None:
        super().__init__()
        self.place, self.gru = place, nn.GRU(8, 32, batch_first=True)

    def forward(self, images: Tensor) -> Tensor:
        return self.gru(images.reshape(-1, 8, 8))[0][:, self.place]


class Words(nn.Module):
    """The mean of the embeddings of words; the word 0 fills lines up, and is left out."""

    def __init__(self, width: int, inverted: bool = False) -> None:
        super().__init__()
        self.inverted, self.embedding = inverted, nn.Embedding(WORDS, width)

    def forward(self, words: Tensor) -> Tensor:
        filling = (words == 0) != self.inverted
        embedded = self.embedding(words).masked_fill(filling[:, :, None], 0.0)
        return embedded.sum(1) / (~filling).sum(1, keepdim=True).clamp(min=1)


def _first_words() -> Run:
    """Return a run that classifies lines of eight words by the kind of the first."""
    words = torch.randint(WORDS, (2048, LENGTH))
    batches = data.minibatches(words, words[:, 0] % 4, 64)
    embed = (nn.Embedding(WORDS, 32), networks.Positions(LENGTH, 32))
    nn.init.normal_(embed[1].positions)
    body = nn.Sequential(*embed, networks.Block(32, 4, causal=False), nn.LayerNorm(32),
                         networks.Pool())  # fmt: skip
    return healthy.classify(networks.Net(body, nn.Linear(32, 4)), batches, AdamW, 1e-2)


def _lines() -> Run:
    """Return a run on lines of 3 to 8 words from four topics, padded by the word 0."""
    topics = torch.randint(TOPICS, (2048,))
    share = (1.5 * torch.randn(TOPICS, WORDS - 1)).softmax(1)
    words = 1 + share[topics].multinomial(LENGTH, replacement=True)
    lengths = torch.randint(3, LENGTH + 1, (2048, 1))
    words[torch.arange(LENGTH) >= lengths] = 0
    body = nn.Sequential(Words(32), nn.Linear(32, 32), nn.ReLU())
    batches = data.minibatches(words, topics, 64)
    return healthy.classify(networks.Net(body, nn.Linear(32, TOPICS)), batches, AdamW, 1e-2)


def _read() -> Run:
    return healthy.classify(networks.Net(Read(), nn.Linear(32, 10)), data.images(), AdamW, 1e-2)


FIRST_WORDS = Healthy("first-word-adamw", "transformer", _first_words)
LINES = Healthy("padded-lines-adamw", "MLP", _lines)
READ = Healthy("read-rows-gru-adamw", "GRU", _read)


def without_positions(run: Run) -> None:
    body = [m for m in run.model.body if not isinstance(m, networks.Positions)]
    run.model.body = nn.Sequential(*body)


def attribute(module: type[nn.Module], **values: object) -> Callable[[Run], None]:
    """Sets these of all modules of a class."""

    def plant(run: Run) -> None:
        for each in run.model.modules():
            if isinstance(each, module):
                for name, value in values.items():
                    setattr(each, name, value)

    return plant


def overwritten(run: Run) -> None:
    """Overwrite half of the features."""
    run.model.body.insert(
        0, Computes(lambda m, x: torch.cat([x[:, :32], torch.ones_like(x[:, 32:])], 1))
    )


SET_BY = [
    case(FIRST_WORDS, "no positions", without_positions, "order-ignored"),
    case(LINES, "mask inverted", attribute(Words, inverted=True), "input-partly-ignored"),
    *reported_kinds.SET_BY,
]
HELD_OUT = [
    case(healthy.VIT, "no positions", without_positions, "order-ignored"),
    case(READ, "the first output read", attribute(Read, place=0), "input-partly-ignored"),
    case(healthy.MLP_SGD, "half of the features overwritten", overwritten,
          "input-partly-ignored"),
    *reported_kinds.HELD_OUT,
]  # fmt: skip
