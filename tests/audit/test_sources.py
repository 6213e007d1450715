"""Models, weights, data, losses and optimizers by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from audit import command_models
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from adiv_monitor.audit.command import models, prepare
from adiv_monitor.audit.command.code import UsageError, imported
from adiv_monitor.audit.command.models import Form, Shape, fit
from adiv_monitor.audit.command.options import Config
from adiv_monitor.audit.command.prepare import SOURCES, data
from adiv_monitor.audit.training.setup import LossError, loss_of_output, seeded

HERE = "audit.command_models"
MLP, IMAGES = (64,), (3, 8, 8)  # shapes of samples
BCE = "binary_cross_entropy_with_logits"
OF_CLASSES = {"input_shape": IMAGES, "num_classes": 5}


def batches_of(module: nn.Module, **options: Any) -> tuple[tuple[Any, ...], str | None]:
    config = Config(**{"model": "m", "batch_size": 4, "steps": 3, **options})
    with seeded(0):
        return data(config, module, torch.device("cpu"), torch.float32)[:2]


# Import paths


def test_import_paths_with_and_without_a_colon() -> None:
    assert imported(f"{HERE}:mlp", "MODEL") is command_models.mlp
    assert imported(f"{HERE}.mlp", "MODEL") is command_models.mlp
    forward = command_models.TwoInputs.forward
    assert imported(f"{HERE}:TwoInputs.forward", "MODEL") is forward


# Models


def test_classes_functions_and_instances_are_models() -> None:
    assert isinstance(models.build(f"{HERE}:TwoInputs", {}), command_models.TwoInputs)
    assert models.build(f"{HERE}:mlp", {"width": 3})[1].out_features == 3  # type: ignore[index]
    assert models.build(f"{HERE}:net", {}) is command_models.net


def test_timm_models_by_name() -> None:
    pytest.importorskip("timm")
    assert fit(models.build("timm:resnet18", {"num_classes": 3}), (3, 32, 32))[2] == (3,)
    for name, given, told in (
        ("resnet188", {}, "no such model; did you mean resnet18"),
        ("resnet18", {"checkpoint_path": "evil.pt"}, "give --checkpoint"),
    ):
        with pytest.raises(UsageError, match=told):
            models.build(f"timm:{name}", given)


# What a model takes and gives


@pytest.mark.parametrize(
    ("name", "shape", "usual", "found"),
    [
        ("LanguageModel", (8,), (32,), ((8,), 100, (8, 100))),
        ("Segmentation", None, (3, 32, 32), ((3, 32, 32), None, (5, 32, 32))),
        ("mlp", None, (1, 8, 8), ((1, 8, 8), None, (10,))),
    ],
)
def test_inputs_are_those_given_or_those_of_the_data(
    name: str, shape: Shape | None, usual: Shape, found: tuple[Any, ...]
) -> None:
    model = getattr(command_models, name)()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = torch.get_rng_state()
    assert fit(model, shape, usual) == found
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())


def test_the_shape_of_torchvisions_models_is_known() -> None:
    vision = pytest.importorskip("torchvision.models")
    vit = vision.VisionTransformer(16, 8, 1, 2, 16, 16, num_classes=4)
    for model, side in ((vision.squeezenet1_1(), 64), (vit, 16)):
        assert fit(model, None)[0] == (3, side, side)


CASES: tuple[tuple[nn.Module, dict[str, Any], str, tuple[int, ...]], ...] = (
    (command_models.mlp(), {"input_shape": MLP}, "cross_entropy", ()),
    (command_models.mlp(classes=1), {"input_shape": MLP}, "mse", (1,)),
    (command_models.mlp(), {"input_shape": MLP, "loss": "mse"}, "mse", (10,)),
    (command_models.mlp(), {"input_shape": MLP, "loss": BCE}, BCE, (10,)),
    (command_models.LanguageModel(), {"input_shape": (16,)}, "cross_entropy", (16,)),
    (command_models.LanguageModel(20, 5), {"input_shape": (16,)}, "cross_entropy", (16,)),
    (command_models.auto_encoder(), {"input_shape": IMAGES}, "mse", IMAGES),
    (command_models.Segmentation(), {"input_shape": IMAGES}, "mse", (5, 8, 8)),
    (command_models.Segmentation(), OF_CLASSES, "cross_entropy", (8, 8)),
)


@pytest.mark.parametrize(("model", "options", "loss", "shape"), CASES)
def test_targets_fit_outputs_and_loss(
    model: nn.Module, options: dict[str, Any], loss: str, shape: tuple[int, ...]
) -> None:
    batches, name = batches_of(model, **options)
    target = batches[0][-1]
    assert (name, target.shape) == (loss, (4, *shape)) and len(batches) == 3
    assert target.is_floating_point() == (loss != "cross_entropy")
    assert not torch.equal(batches[0][0], batches[1][0])
    value = prepare.loss_of(loss)(model, batches[0])
    assert value.shape == () and bool(value.isfinite())
    if options["input_shape"] == (16,) and model.head.out_features == 100:  # type: ignore[union-attr]
        assert torch.equal(batches[0][0][:, 1:], target[:, :-1]), "the next token"


# Data


def drawn(
    name: str, shape: Shape, classes: int = 10, words: int | None = None, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Return the samples and classes of a source, 640 of random data."""
    config = Config("m", num_classes=classes, batch_size=20, steps=60, seed=seed)
    fits = Form(shape, words, lambda x, label: x, None, None)
    samples, found = SOURCES[name][1](config, fits, "")
    assert isinstance(samples, TensorDataset) and found == classes
    x, label = samples.tensors
    return x, label


@pytest.mark.parametrize("shape", [(64,), (1, 28, 28), (3, 32, 32), (32, 6)])
def test_digits_in_the_models_shape(shape: tuple[int, ...]) -> None:
    pytest.importorskip("sklearn")
    x, label = drawn("digits", shape)
    assert x.shape == (1797, *shape) and float(x.min()) >= 0 and float(x.max()) <= 1
    assert int(label[3]) == 3


def test_an_auto_encoder_learns_the_data_themselves() -> None:
    pytest.importorskip("sklearn")
    x, target = batches_of(command_models.auto_encoder(), data="digits", input_shape=IMAGES)[0][0]
    assert torch.equal(x, target)


def test_image_folders_and_cifar10(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("torchvision")
    for name, colour in (("cats", (255, 0, 0)), ("dogs", (0, 0, 255))):
        (tmp_path / name).mkdir()
        for i in range(4):
            image.new("RGB", (20, 30), colour).save(tmp_path / name / f"{i}.png")
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    batches, _ = batches_of(model, data=f"imagefolder:{tmp_path}", input_shape=(3, 16, 16))
    x, label = batches[0]
    assert x.shape == (4, 3, 16, 16)
    assert torch.equal((x[:, 0].mean((1, 2)) < 0.5).long(), label), "cats are red"
    for source in (f"imagefolder:{tmp_path / 'none'}", f"cifar10:{tmp_path}"):
        with pytest.raises(UsageError, match=f"--data {source}.*--download"):
            batches_of(model, data=source, input_shape=(3, 16, 16))


def test_text_is_bytes_in_order(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(b"abcdefghijklmnopqrstuvwxyz" * 40)
    options = {"data": f"text:{file}", "input_shape": (16,)}
    for tokens, target in batches_of(command_models.LanguageModel(), **options)[0]:
        assert torch.equal((tokens + 1) % 26, target)
    for model, content, told in (
        (command_models.LanguageModel(20), "", "26 different tokens, the model's vocabulary is 20"),
        (command_models.mlp(16), "", "expected a model that predicts the next token"),
        (command_models.LanguageModel(), "too short", "has 9 tokens, expected at least 17"),
    ):
        file.write_text(content or file.read_text())
        with pytest.raises(UsageError, match=told):
            batches_of(model, **options)


def test_the_users_own_batches() -> None:
    batches, loss = batches_of(command_models.TwoInputs(), data=f"{HERE}:pairs", steps=2)
    assert len(batches) == 2 and len(batches[0]) == 3 and loss == "mse"


# Losses and optimizers


def test_losses_by_import_path() -> None:
    model, batch = command_models.net, (torch.randn(4, 5), torch.randn(4, 3))
    expected = F.mse_loss(model(batch[0]), batch[1])
    for name in ("mse", f"{HERE}:of_output_and_target", "torch.nn:MSELoss"):
        torch.testing.assert_close(prepare.loss_of(name)(model, batch), expected)
    own = prepare.loss_of(f"{HERE}:of_model_and_batch")(model, batch)
    torch.testing.assert_close(own, model(batch[0]).square().mean())


def test_a_loss_that_can_not_take_the_targets_is_told_in_one_line() -> None:
    batch = torch.randn(4, 5), torch.full((4,), 3)
    with pytest.raises(LossError, match=r"shape \(4,\), int64: .*out of bounds") as caught:
        prepare.loss_of("cross_entropy")(command_models.net, batch)
    assert "\n" not in str(caught.value)


def optimizer_of(name: str, arguments: dict[str, Any]) -> Optimizer:
    made = prepare.optimizer_of(name, arguments)
    assert not isinstance(made, Optimizer)
    return made(command_models.net)


def test_optimizers_by_name_and_import_path() -> None:
    for name in ("sgd", "SGD", "torch.optim:SGD", f"{HERE}:sgd"):
        made = optimizer_of(name, {"lr": 0.5})
        assert type(made) is torch.optim.SGD and made.param_groups[0]["lr"] == 0.5


def of_digits(model: nn.Module, shape: Shape) -> Callable[[], object]:
    return lambda: batches_of(model, data="digits", input_shape=shape)


def own(source: str) -> Callable[[], object]:
    return lambda: batches_of(command_models.TwoInputs(), data=source)


def path(name: str) -> Callable[[], object]:
    return lambda: imported(name, "MODEL")


FLAT = nn.Sequential(nn.Linear(5, 1), nn.Flatten(0))
WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "no module": (path("no_such_module:x"), "^MODEL .*No module named 'no_such_module'"),
    "no name": (path(f"{HERE}:TwoInput"), "has no attribute 'TwoInput'; did you mean TwoInputs"),
    "no file": (path("train.py:build"), "^MODEL train.py:build: .*No such file"),
    "no name of a file": (path("models/train.py"), r"one of package.module:NAME or FILE.py:NAME"),
    "a name alone": (path("resnet18"), "expected one of package.module:NAME"),
    "a call": (path("os.system('x')"), r"^MODEL os.system\('x'\): .*invalid format"),
    "no shape": (lambda: fit(command_models.net, None), "not known; give .*--data .*--input-shape"),
    "another shape": (lambda: fit(command_models.net, (3, 4)),
                      r"--input-shape \(3, 4\): Sequential can't take"),
    "another input": (lambda: fit(command_models.TwoInputs(), (7,)),
                      "missing 1 required positional argument"),
    "no samples": (lambda: fit(FLAT, (2, 5)), "no output for each sample"),
    "other inputs": (of_digits(command_models.mlp(5), (5,)), "can't be brought"),
    "other classes": (of_digits(command_models.mlp(classes=4), MLP),
                      '10 classes, .* 4 outputs.*"num_classes": 10'),
    "tokens": (of_digits(command_models.LanguageModel(), (16,)),
               "can't be brought to the model's tokens"),
    "no classes": (of_digits(command_models.mlp(classes=1), MLP), "has classes; the model's"),
    "code that fails": (own(f"{HERE}:broken"), "KeyError: 'ouch'"),
    "no data": (own("digitz"), "expected one of random, digits, cifar10"),
    "no loss": (lambda: prepare.loss_of("crossentropy"), "expected one of cross_entropy, nll, mse"),
    "no function": (lambda: prepare.loss_of(f"{HERE}:no_module"), "is not a callable object"),
    "no optimizer": (lambda: prepare.optimizer_of("sgdd", {}), "expected one of ada"),
    "no setting": (lambda: optimizer_of("sgd", {"rate": 1}),
                   "--optimizer sgd with .*keyword argument 'rate'"),
    "no rate": (lambda: optimizer_of("sgd", {"lr": -1}),
                "--optimizer sgd with .*Invalid learning"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_can_not_be_used_is_told(name: str) -> None:
    pytest.importorskip("sklearn")
    call, told = WRONG[name]
    with pytest.raises(UsageError, match=told):
        call()


# Checkpoints


def test_pickles_that_run_code_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = command_models.mlp()
    torch.save({**model.state_dict(), "evil": command_models.Evil()}, "evil.pt")
    with pytest.raises(UsageError, match=r"runs code \(\w+\.mkdir\).*--trust-checkpoint"):
        models.load(model, "evil.pt")
    assert not Path("evil").exists()
    with pytest.raises(UsageError):  # trusted, it runs, and what it leaves is no weight
        models.load(model, "evil.pt", trusted=True)
    assert Path("evil").exists()


@pytest.mark.parametrize("wrap", ["plain", "safetensors", "lightning", "ddp"])
def test_weights_of_any_loop_are_found(wrap: str, tmp_path: Path) -> None:
    trained, model = command_models.mlp(), command_models.mlp()
    state, file = trained.state_dict(), tmp_path / f"weights.{wrap}"
    content: dict[str, Any] = {
        "plain": state,
        "lightning": {"epoch": 3, "state_dict": {f"model.{k}": v for k, v in state.items()}},
        "ddp": {f"module.{k}": v for k, v in state.items()},
    }
    if wrap == "safetensors":
        pytest.importorskip("safetensors.torch").save_file(state, file)
    else:
        torch.save(content[wrap], file)
    models.load(model, str(file))
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())


def test_weights_that_do_not_fit_are_told(tmp_path: Path) -> None:
    model, file = command_models.mlp(), tmp_path / "weights.pt"
    state: dict[str, Any] = dict(command_models.mlp().state_dict())
    state["1.weight"] = torch.ones(2, 2)
    state["x.y"] = state.pop("3.bias")
    torch.save(state, file)
    with pytest.raises(UsageError, match="of another model or --model-args") as caught:
        models.load(model, str(file))
    assert all(key in str(caught.value) for key in ("3.bias", "x.y", "1.weight"))
    torch.save({"epoch": 3}, file)
    with pytest.raises(UsageError, match="expected a state dict"):
        models.load(model, str(file))


# Hugging Face

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 90}
SMALL |= {"intermediate_size": 16, "max_position_embeddings": 32}
GPT = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 90, "n_positions": 32}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 90}
VIT = {**SMALL, "image_size": 16, "patch_size": 8}


def hf(tmp_path: Path, architecture: str | None, content: dict[str, Any]) -> str:
    pytest.importorskip("transformers")
    names = {} if architecture is None else {"architectures": [architecture]}
    (tmp_path / "config.json").write_text(json.dumps({**names, **content}))
    return f"hf:{tmp_path}"


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("architecture", "content"),
    [
        ("GPT2LMHeadModel", {**GPT, "bos_token_id": 0, "eos_token_id": 0}),
        ("BertForMaskedLM", SMALL),
        ("BertForSequenceClassification", {**SMALL, "num_labels": 1}),
        ("BertForSequenceClassification", {**SMALL, "num_labels": 3}),
        ("BertForTokenClassification", SMALL),
        ("T5ForConditionalGeneration", {**T5, "decoder_start_token_id": 0}),
        ("ViTForImageClassification", VIT),
    ],
)
def test_heads_get_the_labels_that_they_want(
    architecture: str, content: dict[str, Any], tmp_path: Path
) -> None:
    with seeded(0):
        model = models.build(hf(tmp_path, architecture, content), {})
        batches, name = batches_of(model)
        loss = loss_of_output(model, batches[0])
    assert name is None and bool(loss.isfinite()) and float(loss.detach()) > 0


KERNEL = {"attn_implementation": {"text": "sdpa", "vision": "evil/kernel"}}
NO_CONFIGURATIONS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "code of its own": ("EvilModel", {"auto_map": {"AutoModel": "evil.EvilModel"}}),
    "evil/kernel, code of the hub": ("BertForMaskedLM", {"vision": KERNEL}),
    "its architectures are ['NoSuchModel']": ("NoSuchModel", {}),
    "expected one class of transformers": ("PretrainedConfig", {}),
    'such as "architectures": ["GPT2LMHeadModel"]': (None, {"model_type": "gpt2"}),
    "can't be made of it": ("BertForMaskedLM", {"hidden_size": 5, "num_attention_heads": 2}),
}


@pytest.mark.parametrize("told", NO_CONFIGURATIONS)
def test_configurations_that_can_not_be_used_are_told(told: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        models.build(hf(tmp_path, *NO_CONFIGURATIONS[told]), {})
    assert told in str(caught.value)
