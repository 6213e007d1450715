"""A character GPT of 7 M parameters on the text of Python's standard library.

Six blocks, 312 wide, pre-LayerNorm, AdamW with weight decay 0.1, linear warm-up over a twentieth of
the steps and a cosine to zero.
"""

import math
from collections.abc import Iterator

import text
import torch
from case import Batch, Case, Part
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

WIDTH, BLOCKS, HEADS, LENGTH, ROWS = 312, 6, 6, 128, 16


class GPT(nn.Module):
    """Scores of the next character, (rows, length, characters), of characters (rows, length)."""

    mask: Tensor

    def __init__(self, width: int = WIDTH, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.characters = nn.Embedding(text.VOCABULARY, width)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        layer = nn.TransformerEncoderLayer(
            *(width, HEADS, 4 * width, 0.0, "gelu"), batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)
        for copied in self.blocks.layers:  # which begin as copies of one
            for weight in copied.parameters():
                if weight.dim() > 1:
                    nn.init.normal_(weight, std=0.02)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, text.VOCABULARY)
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        """Of x, (rows, length)."""
        h = self.blocks(self.characters(x) + self.places, mask=self.mask, is_causal=True)
        scores: Tensor = self.head(self.norm(h))
        return scores


def warmed(optimizer: Optimizer, steps: int) -> LambdaLR:
    """Linear over a twentieth of the steps, then a cosine to zero."""
    first = max(steps // 20, 1)

    def factor(step: int) -> float:
        if step < first:
            return (step + 1) / first
        return 0.5 * (1 + math.cos(math.pi * (step - first) / max(steps - first, 1)))

    return LambdaLR(optimizer, factor)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Nats per character."""
    return cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def case(data: str, *, quick: bool, device: str = "cpu") -> Case:
    """The case; it has data of its own."""
    found = text.load(50_000 if quick else 3_000_000)

    def part(seed: int) -> Part:
        def batches() -> Iterator[Batch]:
            chance = torch.Generator().manual_seed(seed)
            while True:
                pieces = text.batch(found.train, ROWS, LENGTH, chance).to(device)
                yield pieces[:, :-1], pieces[:, 1:]

        def tested(characters: Tensor, model: nn.Module) -> float:
            count = min(len(characters) // (LENGTH + 1), 2 if quick else 200)
            pieces = characters[: count * (LENGTH + 1)].view(count, LENGTH + 1).to(device)
            return loss(model, (pieces[:, :-1], pieces[:, 1:])).item()

        return Part(
            batches,
            lambda model: -tested(found.held_out, model),
            lambda model: tested(found.test, model),
        )

    return Case(
        title="A character GPT",
        setting=f"{BLOCKS} blocks, {WIDTH} wide, pre-LayerNorm; AdamW, weight decay 0.1, warm-up "
        f"and cosine; {ROWS} pieces of {LENGTH} characters a step.",
        data=found.source,
        expected="Nothing to act on. The monitor shows large common_share behind the LayerNorms "
        "(their outputs are not centred over tokens) and low gradient_cosine. Advice, if any, is "
        "no better than the baseline by two standard errors.",
        unit="test loss, nats per character",
        higher=False,
        rates=(1e-4, 3e-4, 1e-3, 3e-3, 1e-2),
        steps=2 if quick else 2000,
        model=lambda: (GPT(24, 1) if quick else GPT()).to(device),
        optimizer=lambda model, lr: torch.optim.AdamW(model.parameters(), lr, weight_decay=0.1),
        scheduler=warmed,
        loss=loss,
        part=part,
    )
