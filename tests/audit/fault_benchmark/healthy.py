"""Healthy runs of several kinds, in which nothing is to be fixed.

Learning rates are those of the grid 1, 3, 10, … that the part `sweep` found best for an audit's
steps, or the next below. They are set only in this file.
"""

from audit.fault_benchmark import data, networks
from audit.fault_benchmark.run import Healthy, Run
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    outputs = model(inputs)
    return functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def squared_error(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return functional.mse_loss(model(inputs), targets)


def classify(
    model: nn.Module,
    batches: data.Batches,
    algorithm: type[Optimizer],
    lr: float,
    **settings: float,
) -> Run:
    return Run(model, batches, cross_entropy, algorithm, {"lr": lr, **settings})


def _mlp_sgd() -> Run:
    return classify(networks.mlp([64, 64, 64, 10]), data.digits(), SGD, 0.3)


def _mlp_adam() -> Run:
    return classify(networks.mlp([64, 64, 64, 10]), data.digits(), Adam, 3e-3)


def _mlp_momentum() -> Run:
    return classify(networks.mlp([64, 64, 64, 10]), data.digits(), SGD, 0.1, momentum=0.9)


def _mlp_dropout() -> Run:
    return classify(networks.mlp([64, 128, 64, 10], dropout=0.2), data.digits(), AdamW, 3e-3)


def _mlp_rmsprop() -> Run:
    model = networks.mlp([data.VOCABULARY, 32, 6], nn.Softplus)
    return classify(model, data.counts(), RMSprop, 1e-2)


def _deep_relu() -> Run:
    model = networks.mlp([64] + [48] * 8 + [10])
    networks.initialise(model, 2**0.5)
    return classify(model, data.digits(), SGD, 0.1)


def _deep_tanh() -> Run:
    model = networks.mlp([64] + [48] * 6 + [10], nn.Tanh)
    networks.initialise(model, 1.0)
    return classify(model, data.digits(), SGD, 0.3)


def _circles() -> Run:
    return classify(networks.mlp([2, 32, 32, 2]), data.circles(), Adam, 1e-2)


def _blobs() -> Run:
    return classify(networks.mlp([8, 32, 32, 4]), data.blobs(), SGD, 0.3)


def _regression() -> Run:
    model = networks.mlp([16, 48, 48, 3])
    return Run(model, data.taught(), squared_error, SGD, {"lr": 0.3})


def _autoencoder() -> Run:
    model = networks.mlp([64, 48, 16, 48, 64], nn.GELU)
    return Run(model, data.pictures(), squared_error, Adam, {"lr": 1e-2})


def _cnn_sgd() -> Run:
    return classify(networks.cnn(), data.images(), SGD, 0.3)


def _cnn_adam() -> Run:
    return classify(networks.cnn(), data.images(), Adam, 1e-2)


def _deep_cnn() -> Run:
    model = networks.cnn(layers=6, channels=12)
    networks.initialise(model, 2**0.5)
    return classify(model, data.images(), SGD, 0.03, momentum=0.9)


def _cnn_batch_norm() -> Run:
    return classify(networks.cnn(batch_norm=True), data.images(), SGD, 0.03, momentum=0.9)


def _resnet() -> Run:
    return classify(networks.resnet(), data.images(), SGD, 0.1, momentum=0.9, weight_decay=5e-4)


def _vit() -> Run:
    return classify(networks.vit(), data.images(64), AdamW, 1e-2, weight_decay=0.05)


def _vit_sgd() -> Run:
    return classify(networks.vit(), data.images(64), SGD, 0.1, momentum=0.9)


def _gpt() -> Run:
    return classify(networks.gpt(), data.text(), AdamW, 3e-3, weight_decay=0.1)


def _lstm() -> Run:
    run = classify(networks.lstm(), data.text(), Adam, 1e-2)
    run.clip_norm = 0.5  # at work in some of the steps
    return run


def _bag() -> Run:
    return classify(networks.bag(), data.topics(), Adam, 3e-2)


def _low_epsilon() -> Run:
    return classify(networks.cnn(), data.images(), Adam, 1e-2, eps=1e-16)


def _clipped_adam() -> Run:
    run = _vit()
    run.clip_norm = 0.05  # always at work, and without effect: Adam divides by the norm
    return run


MLP_SGD = Healthy("mlp-sgd", "MLP", _mlp_sgd)
MLP_ADAM = Healthy("mlp-adam", "MLP", _mlp_adam)
MLP_MOMENTUM = Healthy("mlp-momentum", "MLP", _mlp_momentum)
MLP_DROPOUT = Healthy("mlp-dropout-adamw", "MLP", _mlp_dropout)
MLP_RMSPROP = Healthy("counts-rmsprop", "MLP", _mlp_rmsprop)
DEEP_RELU = Healthy("deep-relu-sgd", "MLP", _deep_relu)
DEEP_TANH = Healthy("deep-tanh-sgd", "MLP", _deep_tanh)
CIRCLES = Healthy("circles-adam", "MLP", _circles)
BLOBS = Healthy("blobs-sgd", "MLP", _blobs)
REGRESSION = Healthy("regression-sgd", "MLP", _regression)
AUTOENCODER = Healthy("autoencoder-adam", "MLP", _autoencoder)
CNN_SGD = Healthy("cnn-sgd", "CNN", _cnn_sgd)
CNN_ADAM = Healthy("cnn-adam", "CNN", _cnn_adam)
DEEP_CNN = Healthy("deep-cnn-sgd", "CNN", _deep_cnn)
CNN_BATCH_NORM = Healthy("cnn-batchnorm-momentum", "CNN", _cnn_batch_norm)
RESNET = Healthy("resnet-momentum", "CNN", _resnet)
VIT = Healthy("vit-adamw", "transformer", _vit)
VIT_SGD = Healthy("vit-momentum", "transformer", _vit_sgd)
GPT = Healthy("gpt-adamw", "transformer", _gpt)
LSTM = Healthy("lstm-adam-clipped", "LSTM", _lstm)
BAG = Healthy("embedding-bag-adam", "embedding bag", _bag)
LOW_EPSILON = Healthy("cnn-adam-epsilon-1e-16", "CNN", _low_epsilon)
CLIPPED_ADAM = Healthy("vit-adamw-always-clipped", "transformer", _clipped_adam)

HEALTHY: dict[str, Healthy] = {
    healthy.name: healthy for healthy in list(globals().values()) if isinstance(healthy, Healthy)
}
