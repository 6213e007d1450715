"""Models out of torch alone: recurrent, shared, adversarial, and one that is no module at all."""

from functools import partial

import torch
from computes import Computes
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm

from zoo.training import Specimen, Trained, Training, training

WORDS = 64


class LSTMLanguageModel(nn.Module):
    """Embedding, two LSTM layers, dropout, read-out.

    Args:
        tied: the read-out's weight is the embedding's.
    """

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 32)
        self.lstm = nn.LSTM(32, 32, num_layers=2, batch_first=True)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(32, WORDS)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.dropout(self.embedding(tokens)))
        return self.head(self.dropout(hidden))


def lstm(tied: bool) -> Training:
    def loss(model: nn.Module) -> Tensor:
        tokens = torch.randint(WORDS, (4, 13))
        output = model(tokens[:, :-1])
        return functional.cross_entropy(output.flatten(0, 1), tokens[:, 1:].flatten())

    return training(LSTMLanguageModel(tied), loss)


def transformer() -> Training:
    """torch's encoder and decoder; the targets are noise."""
    model = nn.Transformer(
        d_model=32,
        nhead=4,
        num_encoder_layers=2,
        num_decoder_layers=2,
        dim_feedforward=64,
        batch_first=True,
    )
    causal = nn.Transformer.generate_square_subsequent_mask(6)

    def loss(model: nn.Module) -> Tensor:
        output = model(torch.randn(3, 7, 32), torch.randn(3, 6, 32), tgt_mask=causal)
        return functional.mse_loss(output, torch.randn(3, 6, 32))

    return training(model, loss)


def generator() -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(8, 32, 4, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(inplace=True),
        nn.ConvTranspose2d(32, 16, 4, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.ConvTranspose2d(16, 3, 4, stride=2, padding=1),
        nn.Tanh(),
    )


def discriminator() -> nn.Module:
    return nn.Sequential(
        spectral_norm(nn.Conv2d(3, 16, 4, stride=2, padding=1)),
        nn.LeakyReLU(0.2, inplace=True),
        spectral_norm(nn.Conv2d(16, 32, 4, stride=2, padding=1)),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Dropout(0.2),
        spectral_norm(nn.Conv2d(32, 1, 4)),
        nn.Flatten(0),
    )


def gan() -> Training:
    """A DCGAN whose discriminator is spectrally normed; one optimizer for each of the two."""
    makes, judges = generator(), discriminator()
    made_by, judged_by = (
        torch.optim.Adam(m.parameters(), lr=2e-4, betas=(0.5, 0.999)) for m in (makes, judges)
    )
    true_or_not = functional.binary_cross_entropy_with_logits

    def step() -> list[Tensor]:
        real, fake = torch.randn(4, 3, 16, 16), makes(torch.randn(4, 8, 1, 1))
        judged_by.zero_grad()
        told = true_or_not(judges(real), torch.ones(4))
        told = told + true_or_not(judges(fake.detach()), torch.zeros(4))
        told.backward()
        judged_by.step()
        made_by.zero_grad()
        fooled = true_or_not(judges(fake), torch.ones(4))
        fooled.backward()
        made_by.step()
        return [told.detach(), fooled.detach()]

    return Training([Trained(makes, made_by), Trained(judges, judged_by)], step)


def ten_times() -> Training:
    """One block, called ten times."""
    block = nn.Sequential(
        nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16)
    )

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        for _ in range(10):
            x = x + m.block(x)
        return m.head(x)

    def loss(model: nn.Module) -> Tensor:
        return functional.cross_entropy(model(torch.randn(8, 16)), torch.randint(5, (8,)))

    return training(Computes(forward, block=block, head=nn.Linear(16, 5)), loss)


def function() -> Training:
    """A function of parameters in a dict: no module's forward is ever called."""
    parameters = nn.ParameterDict(
        {"weight": torch.randn(8, 5), "bias": torch.zeros(5), "gain": torch.ones(8)}
    )

    def loss(parameters: nn.Module) -> Tensor:
        x = functional.dropout(torch.randn(6, 8), 0.1) * parameters["gain"]
        output = x @ parameters["weight"] + parameters["bias"]
        return functional.cross_entropy(output, torch.randint(5, (6,)))

    return training(parameters, loss)


OUTSIDE = "used outside the forward of any module"
TORCH = {
    "lstm": Specimen("LSTM language model", partial(lstm, tied=False)),
    "lstm_tied": Specimen("LSTM language model, tied read-out", partial(lstm, tied=True)),
    "transformer": Specimen("nn.Transformer", transformer),
    "gan": Specimen("GAN, two optimizers, spectral norm", gan),
    "ten_times": Specimen("one block called ten times", ten_times),
    "function": Specimen(
        "function of parameters in a dict",
        function,
        unseen={"weight": OUTSIDE, "bias": OUTSIDE, "gain": OUTSIDE},
    ),
}
