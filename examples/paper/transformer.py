"""A small transformer on text: normalisers, affine-like layers, corrected queries and keys.

    python examples/paper/transformer.py --quick --out OUT     one learning rate each
    python examples/paper/transformer.py --out OUT             minutes

Two blocks, 64 wide, predict the next character of Python's standard library, trained with AdamW at
a learning rate tuned for each arm:

- layernorm: as in GPT-2, without the parameters of the normalisers; rmsnorm; none: neither;
- affine-like: no normaliser; every linear layer is affine-like, the projections of attention too;
- qk-corrected: layernorm; queries and keys by affine-like projections, then normalised (QK-norm),
  which makes all scales of attention scores equal.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import text
import torch
from adiv_layers import CorrectedMultiheadAttention, convert
from commandline import count, parsed
from table import plus
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from training import Run
from tuned import Trial, answer, read
from tuned_report import Best, Claim, Question, Verdict, above, mean, more

from adiv_monitor import Monitor

WIDTH, BLOCKS, HEADS, LENGTH, ROWS = 64, 2, 4, 48, 16
REPORTS = 5
NORMALISERS: dict[str, Callable[[], nn.Module]] = {
    "layernorm": partial(nn.LayerNorm, WIDTH, elementwise_affine=False),
    "rmsnorm": partial(nn.RMSNorm, WIDTH, elementwise_affine=False),
    "none": nn.Identity,
    "affine-like": nn.Identity,
    "qk-corrected": partial(nn.LayerNorm, WIDTH, elementwise_affine=False),
}
# Learning rates that are tried first, in half decades from 1: −5 is 0.003.
GRIDS = {arm: range(-6, -3) for arm in NORMALISERS}
MEASURES = (
    *("scale_cv", "common_share", "gradient_cosine", "update_cosine", "interference_ratio"),
    *("update_ratio", "attention_cosine", "attention_scale_cv"),
)
LITTLE = 0.02  # nats per character


class Block(nn.Module):
    """Attention and two affine maps, each behind a normaliser and added to what was there."""

    mask: Tensor

    def __init__(self, arm: str) -> None:
        super().__init__()
        self.before, self.between = NORMALISERS[arm](), NORMALISERS[arm]()
        if arm == "qk-corrected":
            self.attention: nn.MultiheadAttention = CorrectedMultiheadAttention(
                WIDTH,
                HEADS,
                batch_first=True,
                qk_norm=True,
                v_proj="standard",
                out_proj="standard",
            )
        else:
            self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.maps = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        """Of x, (rows, length, width)."""
        h = self.before(x)
        attended, _ = self.attention(
            h, h, h, attn_mask=self.mask, is_causal=True, need_weights=False
        )
        x = x + attended
        mapped: Tensor = self.maps(self.between(x))
        return x + mapped


class Transformer(nn.Module):
    """Scores of the next character, (rows, length, characters), of characters (rows, length)."""

    def __init__(self, arm: str) -> None:
        super().__init__()
        self.characters = nn.Embedding(text.VOCABULARY, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.Sequential(*(Block(arm) for _ in range(BLOCKS)))
        self.last = NORMALISERS[arm]()
        self.head = nn.Linear(WIDTH, text.VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        """Of x, (rows, length)."""
        h = self.last(self.blocks(self.characters(x) + self.places))
        scores: Tensor = self.head(h)
        return scores


def model(arm: str, seed: int) -> Transformer:
    """A network of an arm."""
    torch.manual_seed(seed)
    found = Transformer(arm)
    if arm == "affine-like":
        convert(found, "affine-like", attention=True)
    return found


def loss(model: nn.Module, pieces: Tensor) -> Tensor:
    """Nats per character."""
    scores = model(pieces[:, :-1])
    return cross_entropy(scores.flatten(0, 1), pieces[:, 1:].flatten())


@torch.no_grad()
def tested(model: nn.Module, part: Tensor) -> float | None:
    """Nats per character over a part of the text, at most 200 pieces; None if not finite."""
    pieces = part[: len(part) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)[:200]
    found = loss(model, pieces).item()
    return round(found, 4) if found < float("inf") else None


def train(trial: Trial, data: text.Text, steps: int) -> Run:
    """Train one network; its score is the loss on the text held out, with the sign changed."""
    alone = model(trial.arm, trial.seed)
    optimizer = torch.optim.AdamW(alone.parameters(), trial.learning_rate)
    generator = torch.Generator().manual_seed(trial.seed)
    every = max(steps // REPORTS, 1)
    with Monitor(alone, optimizer, every_n_steps=every, attention=True) as monitor:
        for _ in range(steps):
            optimizer.zero_grad()
            torch.autograd.backward(loss(alone, text.batch(data.train, ROWS, LENGTH, generator)))
            optimizer.step()
        monitor.complete_report()
        readings = read(list(monitor.reports), MEASURES)
    held_out = tested(alone, data.held_out)
    score = None if held_out is None else -held_out
    return {"score": score, "result": tested(alone, data.test), **readings}


def _worse(arm: str, least: float, found: Best) -> Verdict:
    difference, error = more(found, arm, "layernorm")
    return above(difference, error, least), plus(difference, error, sign=True)


def _alike(arm: str, found: Best) -> Verdict:
    difference, error = more(found, arm, "layernorm")
    apart = above(abs(difference), error, LITTLE)
    return None if apart is None else not apart, plus(difference, error, sign=True)


def _corrected(found: Best) -> Verdict:
    spread = mean(found["affine-like"], "scale_cv")
    return spread < 0.01, f"{spread:.2g}"


def _scores(found: Best) -> Verdict:
    corrected, plain = (
        mean(found[arm], "attention_scale_cv") for arm in ("qk-corrected", "layernorm")
    )
    return corrected < plain / 2, f"{corrected:.3g} and {plain:.3g}"


QUESTION = Question(
    title="A small transformer on text",
    setting=f"{BLOCKS} blocks, {WIDTH} wide, {HEADS} heads; {ROWS} pieces of {LENGTH} characters "
    "a step; AdamW.",
    score="−loss on text held out, nats per character",
    unit="test loss, nats per character",
    measures=MEASURES,
    panels=(("scale_cv", "step"), ("update_cosine", "step"), ("attention_scale_cv", "step")),
    claims=(
        Claim(
            "every row scale of the affine-like network is equal (scale_cv below 0.01)", _corrected
        ),
        Claim(
            "corrected queries and keys have less than half of the spread of scores' scales",
            _scores,
        ),
        Claim(
            f"and yet the loss is that of layernorm to {LITTLE} nats",
            partial(_alike, "qk-corrected"),
        ),
        Claim(f"rmsnorm's loss is that of layernorm to {LITTLE} nats", partial(_alike, "rmsnorm")),
        Claim("without normalisers the loss is higher", partial(_worse, "none", 0.0)),
        Claim(
            "affine-like maps are no full substitute for normalisers: the loss is higher by more "
            "than 0.05 nats",
            partial(_worse, "affine-like", 0.05),
        ),
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--seeds", type=count, default=2)
    parser.add_argument("--steps", type=count, default=200)
    parser.add_argument("--quick", action="store_true", help="as little as shows that it runs")
    given = parsed(parser, seeds=1, steps=40)
    characters = 50_000 if given.quick else 1_000_000
    torch.set_num_threads(1)
    data = text.load(characters)
    known = {"data": data.source, "sha256": data.sha256, "steps": given.steps}
    file = given.out / "transformer.json"
    answer(
        QUESTION, file, GRIDS, known, partial(train, data=data, steps=given.steps), given, parser
    )


if __name__ == "__main__":
    main()
