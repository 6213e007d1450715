"""Networks of 1 to 12 M parameters for `larger_faults.py`: as they should be, and with a bug."""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchvision.models import resnet18

Batches = list[tuple[Tensor, Tensor]]
CLASSES, WORDS, LENGTH, WIDTH = 10, 256, 64, 256


# ResNet-18


def images() -> Batches:
    """Images of 64 × 64 in which a class shows as a pattern, as strong as the noise."""
    chance = torch.Generator().manual_seed(0)
    patterns = torch.randn(CLASSES, 3, 64, 64, generator=chance)
    labels = torch.randint(CLASSES, (32, 16), generator=chance)
    return [(patterns[y] + torch.randn(16, 3, 64, 64, generator=chance), y) for y in labels]


def resnet() -> nn.Module:
    return resnet18(num_classes=CLASSES)


def resnet_softmax() -> nn.Module:
    """Ends in a softmax; the loss is cross-entropy."""
    return nn.Sequential(resnet(), nn.Softmax(1))


def resnet_frozen_statistics() -> nn.Module:
    """Its batch normalisations stay in evaluation mode, with the statistics they begin with."""
    model = Stays(resnet())
    model.eval()
    return model


def resnet_listed() -> nn.Module:
    """Its last stage is in a plain list."""
    return Listed(resnet())


class Stays(nn.Module):
    """Keeps what it holds in evaluation mode."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def train(self, mode: bool = True) -> "Stays":
        return super().train(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


class Listed(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.last = [model.layer4]
        model.layer4 = nn.Identity()
        self.head, model.fc = model.fc, nn.Identity()
        self.pool, model.avgpool = model.avgpool, nn.Identity()
        self.front = model

    def forward(self, x: Tensor) -> Tensor:
        places = self.front(x).reshape(len(x), 256, 4, 4)
        return self.head(self.pool(self.last[0](places)).flatten(1))


# GPT


def text(moved: int = 1) -> Batches:
    """A Markov chain over 256 words; the next ones are asked for."""
    chance = torch.Generator().manual_seed(0)
    following = (3 * torch.randn(WORDS, WORDS, generator=chance)).softmax(1)
    words = [torch.randint(WORDS, (32 * 8,), generator=chance)]
    for _ in range(LENGTH):
        words.append(following[words[-1]].multinomial(1, generator=chance)[:, 0])
    lines = torch.stack(words, 1).split(8)
    return [(line[:, :-1], line[:, moved : LENGTH + moved]) for line in lines]


def text_not_moved() -> Batches:
    """The words themselves are asked for."""
    return text(moved=0)


def by_word(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


class Block(nn.Module):
    def __init__(self, causal: bool, scrambled: bool) -> None:
        super().__init__()
        self.causal, self.scrambled = causal, scrambled
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def heads(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        if self.scrambled:
            return x.reshape(b, 8, t, WIDTH // 8)
        return x.reshape(b, t, 8, WIDTH // 8).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.heads(y) for y in self.qkv(self.norm1(x)).chunk(3, -1))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.project(y.transpose(1, 2).reshape(x.shape))
        return x + self.fc2(functional.gelu(self.fc1(self.norm2(x))))


class GPT(nn.Module):
    """Six blocks of width 256: 4.9 M parameters."""

    def __init__(self, causal: bool = True, scrambled: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.Sequential(*[Block(causal, scrambled) for _ in range(6)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.words(words) + self.places)))


def gpt() -> nn.Module:
    return GPT()


def gpt_without_a_mask() -> nn.Module:
    return GPT(causal=False)


def gpt_heads_by_view() -> nn.Module:
    return GPT(scrambled=True)


# GRU


def sequences() -> Batches:
    """Sequences of 32 steps, in which a class shows as a pattern that comes anywhere."""
    chance = torch.Generator().manual_seed(0)
    patterns = torch.randn(CLASSES, 32, 64, generator=chance)
    labels = torch.randint(CLASSES, (32, 32), generator=chance)
    return [(patterns[y] + torch.randn(32, 32, 64, generator=chance), y) for y in labels]


class GRU(nn.Module):
    """One layer of 540 units: 0.99 M parameters."""

    def __init__(self, batch_first: bool = True, place: int = -1) -> None:
        super().__init__()
        self.place = place
        self.gru, self.head = nn.GRU(64, 540, batch_first=batch_first), nn.Linear(540, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x)[0][:, self.place])


def gru() -> nn.Module:
    return GRU()


def gru_first_output() -> nn.Module:
    return GRU(place=0)


def gru_not_batch_first() -> nn.Module:
    return GRU(batch_first=False)
