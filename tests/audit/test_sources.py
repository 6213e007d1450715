"""Models, weights, data, losses and optimizers by name."""

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from audit import command_models
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from adiv_monitor.audit.options.config import Config
from adiv_monitor.audit.options.usage import UsageError
from adiv_monitor.audit.sources import checkpoints, losses, models, optimizers, random_data
from adiv_monitor.audit.sources.data import Data, data
from adiv_monitor.audit.sources.imported import imported
from adiv_monitor.audit.sources.shapes import Inputs, fit
from adiv_monitor.audit.training.setup import seeded
from adiv_monitor.audit.training.target_loss import LossError

HERE = "audit.command_models"
CPU = torch.device("cpu")


def batches_of(module: nn.Module, **options: Any) -> Data:
    config = Config(**{"model": "m", "batch_size": 4, "steps": 3, **options})
    with seeded(0):
        return data(config, module, CPU, torch.float32)


# Import paths


def test_import_paths_with_and_without_a_colon() -> None:
    assert imported(f"{HERE}:LeNet", "MODEL") is command_models.LeNet
    assert imported(f"{HERE}.LeNet", "MODEL") is command_models.LeNet
    assert imported(f"{HERE}:LeNet.forward", "MODEL") is command_models.LeNet.forward


def test_a_function_wins_over_the_module_of_its_name() -> None:
    torchvision = pytest.importorskip("torchvision")
    assert imported("torchvision.models.googlenet", "MODEL") is torchvision.models.googlenet


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("no_such_module:x", "there is no module 'no_such_module'"),
        ("audit.no_such_module:x", "there is no module 'audit.no_such_module'"),
        (f"{HERE}:LeNett", "has no 'LeNett'; did you mean LeNet"),
        (f"{HERE}.LeNett", "has no 'LeNett'"),
        ("audit.command_models", "that is a module, expected audit.command_models:NAME"),
        ("train.py:build", "there is no file train.py"),
        ("models/train.py", "expected models/train.py:NAME of what is in it"),
        ("models/train.txt:build", "or FILE.py:NAME"),
        ("train", "expected an import path"),
        ("resnet18", "torchvision.models.resnet18"),
        ("a b:c", "expected an import path"),
        ("os.system('x')", "expected an import path"),
    ],
)
def test_a_path_that_leads_nowhere_is_told(path: str, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        imported(path, "MODEL")
    assert told in str(caught.value)


def test_what_a_users_module_misses_is_told_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "with_a_missing_import.py").write_text("\nimport not_there_either\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match=r"not_there_either.*\(with_a_missing_import.py:2\)"):
        imported("with_a_missing_import:x", "MODEL")


# Models


def test_classes_functions_and_instances_are_models() -> None:
    assert isinstance(models.build(f"{HERE}:LeNet", {}), command_models.LeNet)
    assert models.build(f"{HERE}:mlp", {"width": 3})[1].out_features == 3  # type: ignore[index]
    net = models.build(f"{HERE}:net", {})
    assert net is not command_models.net
    assert torch.equal(net[0].weight, command_models.net[0].weight)  # type: ignore[index,arg-type]


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("net", {"a": 1}, "takes no --model-args"),
        ("no_module", {}, "got a dict, expected a torch.nn.Module"),
        ("no_model", {}, "calling it gave dict"),
        ("mlp", {"wdith": 1}, "it takes (inputs: int = 64, width"),
        ("broken", {}, "KeyError: 'ouch' (command_models.py:"),
        ("nn.ReLU", {}, "ReLU has no parameters: nothing to audit"),
    ],
)
def test_what_is_no_model_is_told(name: str, arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError) as caught:
        models.build(f"{HERE}:{name}", arguments)
    assert told in " ".join(str(caught.value).split())


def test_a_frozen_model_is_told() -> None:
    command_models.frozen = nn.Linear(2, 2).requires_grad_(False)  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="requires_grad=False"):
        models.build(f"{HERE}:frozen", {})


def test_timm_models_by_name() -> None:
    pytest.importorskip("timm")
    model = models.build("timm:resnet18", {"num_classes": 3})
    assert fit(model, (3, 32, 32)).output == (2, 3)
    with pytest.raises(UsageError, match="did you mean resnet18"):
        models.build("timm:resnet188", {})
    with pytest.raises(UsageError, match="no such model"):
        models.build("timm:hf-hub:somebody/something", {})


# Shapes


@pytest.mark.parametrize(
    ("name", "shape", "data", "inputs", "output"),
    [
        ("LeNet", (1, 28, 28), "random", Inputs((1, 28, 28)), (2, 10)),
        ("SequenceClassifier", (32, 6), "random", Inputs((32, 6)), (2, 10)),
        ("LanguageModel", (16,), "random", Inputs((16,), 100), (2, 16, 100)),
        ("LanguageModel", (8,), "text", Inputs((8,), 100), (2, 8, 100)),
        ("AutoEncoder", None, "imagefolder", Inputs((3, 64, 64)), (2, 3, 64, 64)),
        ("Segmentation", None, "cifar10", Inputs((3, 32, 32)), (2, 5, 32, 32)),
        ("mlp", None, "digits", Inputs((1, 8, 8)), (2, 10)),
    ],
)
def test_inputs_are_those_given_or_those_of_the_data(
    name: str, shape: tuple[int, ...] | None, data: str, inputs: Inputs, output: tuple[int, ...]
) -> None:
    model = getattr(command_models, name)()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = torch.get_rng_state()
    found = fit(model, shape, data)
    assert (found.inputs, found.output, found.several) == (inputs, output, name == "Segmentation")
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())


def test_the_shape_of_torchvisions_models_is_known() -> None:
    models = pytest.importorskip("torchvision.models")
    assert fit(models.squeezenet1_1(), None).inputs.shape == (3, 64, 64)
    vit = models.VisionTransformer(16, 8, 1, 2, 16, 16, num_classes=4)
    assert fit(vit, None).inputs.shape == (3, 16, 16)


def test_a_shape_that_is_not_known_or_does_not_fit_is_told() -> None:
    with pytest.raises(UsageError, match=r"not known; give .*--data .*--input-shape"):
        fit(command_models.net, None)
    with pytest.raises(UsageError, match=r"--input-shape 3,4 \(floats\): Sequential can't take"):
        fit(command_models.net, (3, 4))
    with pytest.raises(UsageError, match=r"--data .*missing 1 required positional argument"):
        fit(command_models.TwoInputs(), (7,))


# Data


def test_random_inputs_have_their_class_in_their_mean() -> None:
    x, label = random_data.examples(Inputs((40,)), 3, 3000, 0).tensors
    assert abs(float(x.mean())) < 0.1 and abs(float(x.std()) - 1) < 0.1
    means = torch.stack([x[label == c].mean(0) for c in range(3)])
    nearest = torch.cdist(x, means).argmin(1)
    assert float((nearest == label).float().mean()) > 0.95
    again = random_data.examples(Inputs((40,)), 3, 3000, 0).tensors
    assert torch.equal(x, again[0]) and torch.equal(label, again[1])
    assert not torch.equal(x, random_data.examples(Inputs((40,)), 3, 3000, 1).tensors[0])


def test_random_tokens_are_a_chain_that_depends_on_the_class() -> None:
    x, label = random_data.examples(Inputs((20,), 1000), 2, 500, 0).tensors
    assert x.shape == (500, 21) and int(x.min()) >= 936 and int(x.max()) < 1000
    for c in range(2):
        pairs = {(int(a), int(b)) for row in x[label == c] for a, b in pairwise(row)}
        assert len(pairs) <= 64 * 4  # each token has four successors at most


def test_random_images_keep_their_class_under_pooling() -> None:
    x, label = random_data.examples(Inputs((3, 32, 32)), 4, 400, 0).tensors
    pooled = F.adaptive_avg_pool2d(x, 2).flatten(1)
    means = torch.stack([pooled[label == c].mean(0) for c in range(4)])
    nearest = torch.cdist(pooled, means).argmin(1)
    assert float((nearest == label).float().mean()) > 0.9


def test_each_batch_is_another_and_the_note_says_that_it_is_random() -> None:
    found = batches_of(command_models.mlp(), input_shape=(64,))
    assert len(found.batches) == 3 and found.inputs == Inputs((64,))
    assert not torch.equal(found.batches[0][0], found.batches[1][0])
    assert any("random" in note for note in found.notes)
    assert (found.classes, found.loss) == (10, "cross_entropy")


@pytest.mark.parametrize(
    ("model", "options", "loss", "shape", "dtype"),
    [
        (command_models.mlp(), {"input_shape": (64,)}, "cross_entropy", (4,), torch.int64),
        (command_models.mlp(classes=1), {"input_shape": (64,)}, "mse", (4, 1), torch.float32),
        (
            command_models.mlp(),
            {"input_shape": (64,), "loss": "mse"},
            "mse",
            (4, 10),
            torch.float32,
        ),
        (
            command_models.mlp(),
            {"input_shape": (64,), "loss": "binary_cross_entropy_with_logits"},
            "binary_cross_entropy_with_logits",
            (4, 10),
            torch.float32,
        ),
        (
            command_models.LanguageModel(),
            {"input_shape": (16,)},
            "cross_entropy",
            (4, 16),
            torch.int64,
        ),
        (
            command_models.AutoEncoder(),
            {"input_shape": (3, 8, 8)},
            "mse",
            (4, 3, 8, 8),
            torch.float32,
        ),
        (
            command_models.Segmentation(),
            {"input_shape": (3, 8, 8)},
            "mse",
            (4, 5, 8, 8),
            torch.float32,
        ),
        (
            command_models.Segmentation(),
            {"input_shape": (3, 8, 8), "num_classes": 5},
            "cross_entropy",
            (4, 8, 8),
            torch.int64,
        ),
        (
            command_models.SequenceClassifier(),
            {"input_shape": (32, 6)},
            "cross_entropy",
            (4,),
            torch.int64,
        ),
    ],
)
def test_targets_fit_outputs_and_loss(
    model: nn.Module,
    options: dict[str, Any],
    loss: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> None:
    found = batches_of(model, **options)
    target = found.batches[0][-1]
    assert (found.loss, target.shape, target.dtype) == (loss, shape, dtype)
    value = losses.named(loss)(model, found.batches[0])
    assert value.shape == () and bool(value.isfinite())


def test_next_tokens_are_the_next_tokens() -> None:
    found = batches_of(command_models.LanguageModel(), input_shape=(16,))
    tokens, target = found.batches[0]
    assert torch.equal(tokens[:, 1:], target[:, :-1])


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (command_models.mlp(64), (64,)),
        (command_models.mlp(784), (784,)),
        (command_models.mlp(3072), (3072,)),
        (command_models.LeNet(), (1, 28, 28)),
        (nn.Sequential(nn.Conv2d(3, 10, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten()), (3, 64, 64)),
        (command_models.SequenceClassifier(), (32, 6)),
    ],
)
def test_digits_in_the_models_shape(model: nn.Module, shape: tuple[int, ...]) -> None:
    pytest.importorskip("sklearn")
    found = batches_of(model, data="digits", input_shape=shape)
    x, label = found.batches[0]
    assert x.shape == (4, *shape) and float(x.min()) >= 0 and float(x.max()) <= 1
    assert found.classes == 10 and label.dtype == torch.int64 and found.notes == ()


def test_digits_that_can_not_be_brought_to_the_models_shape() -> None:
    pytest.importorskip("sklearn")
    for model, shape, told in (
        (command_models.mlp(5), (5,), "can't be brought"),
        (command_models.mlp(classes=4), (64,), '10 classes, .* 4 outputs.*"num_classes": 10'),
        (command_models.LanguageModel(), (16,), "are images, the model takes 16 .whole numbers"),
        (command_models.mlp(classes=1), (64,), "has classes; the model's outputs"),
    ):
        with pytest.raises(UsageError, match=told):
            batches_of(model, data="digits", input_shape=shape)


def test_an_auto_encoder_learns_digits_themselves() -> None:
    pytest.importorskip("sklearn")
    x, target = batches_of(
        command_models.AutoEncoder(), data="digits", input_shape=(3, 8, 8)
    ).batches[0]
    assert torch.equal(x, target)


def test_image_folders(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("torchvision")
    for name, colour in (("cats", (255, 0, 0)), ("dogs", (0, 0, 255))):
        (tmp_path / name).mkdir()
        for i in range(4):
            image.new("RGB", (20, 30), colour).save(tmp_path / name / f"{i}.png")
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    found = batches_of(model, data=f"imagefolder:{tmp_path}", input_shape=(3, 16, 16))
    x, label = found.batches[0]
    assert found.classes == 2 and x.shape == (4, 3, 16, 16)
    red = x[:, 0].mean((1, 2))
    assert torch.equal((red < 0.5).long(), label)
    for folder in (tmp_path / "none", tmp_path / "cats"):
        with pytest.raises(UsageError, match="imagefolder"):
            batches_of(model, data=f"imagefolder:{folder}")


def test_cifar10_is_not_fetched_unless_asked(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    model = nn.Sequential(nn.Conv2d(3, 10, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(UsageError, match="--download"):
        batches_of(model, data=f"cifar10:{tmp_path}")
    assert list(tmp_path.iterdir()) == []


def test_text_is_bytes_in_order(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(b"abcdefghijklmnopqrstuvwxyz" * 40)
    options = {"data": f"text:{file}", "input_shape": (16,)}
    for tokens, target in batches_of(command_models.LanguageModel(), **options).batches:
        assert torch.equal((tokens + 1) % 26, target)
    for model, told in (
        (command_models.LanguageModel(20), "26 different tokens, the model's vocabulary is 20"),
        (command_models.mlp(16), "expected one that takes a sequence of tokens"),
    ):
        with pytest.raises(UsageError, match=told):
            batches_of(model, **options)
    file.write_bytes(b"too short")
    with pytest.raises(UsageError, match="has 9 tokens, expected at least 17"):
        batches_of(command_models.LanguageModel(), **options)


def test_the_users_own_batches() -> None:
    found = batches_of(command_models.TwoInputs(), data=f"{HERE}:pairs", steps=2)
    assert len(found.batches) == 2 and len(found.batches[0]) == 3
    assert (found.inputs, found.loss) == (None, "mse")
    with pytest.raises(UsageError, match=r"batch 1: 1 of the 28 values of part \[0\] are NaN"):
        batches_of(command_models.TwoInputs(), data=f"{HERE}:nan_pairs")
    with pytest.raises(UsageError, match="KeyError: 'ouch'"):
        batches_of(command_models.TwoInputs(), data=f"{HERE}:broken")
    with pytest.raises(UsageError, match="got a batch that is a str"):
        batches_of(command_models.TwoInputs(), data=f"{HERE}:no_module")
    with pytest.raises(UsageError, match="expected random, digits"):
        batches_of(command_models.TwoInputs(), data="digitz")


# Losses


def test_cross_entropy_of_tokens_is_that_of_all_tokens() -> None:
    output, target = torch.randn(2, 5, 7), torch.randint(7, (2, 5))

    class Constant(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return output

    value = losses.named("cross_entropy")(Constant(), (torch.zeros(2), target))
    torch.testing.assert_close(value, F.cross_entropy(output.movedim(-1, 1), target))


def test_losses_by_import_path() -> None:
    model, batch = command_models.net, (torch.randn(4, 5), torch.randn(4, 3))
    expected = F.mse_loss(model(batch[0]), batch[1])
    for name in ("mse", f"{HERE}:of_output_and_target", "torch.nn:MSELoss"):
        torch.testing.assert_close(losses.named(name)(model, batch), expected)
    own = losses.named(f"{HERE}:of_model_and_batch")(model, batch)
    torch.testing.assert_close(own, model(batch[0]).square().mean())


@pytest.mark.parametrize(
    ("name", "target", "told"),
    [
        ("cross_entropy", torch.randn(4, 2), "shape (4, 3), float32 with a target of shape (4, 2)"),
        ("mse", torch.randn(4), "expected a target of the output's shape"),
        ("cross_entropy", torch.full((4,), 3), "out of bounds"),
        ("nll", torch.randn(4), "choose another loss"),
    ],
)
def test_a_loss_that_needs_other_targets_is_told(name: str, target: Tensor, told: str) -> None:
    with pytest.raises(LossError) as caught:
        losses.named(name)(command_models.net, (torch.randn(4, 5), target))
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_one_output_has_no_classes() -> None:
    with pytest.raises(LossError, match="tells no classes apart"):
        losses.named("cross_entropy")(nn.Linear(5, 1), (torch.randn(4, 5), torch.randn(4, 1)))


def test_unknown_losses_are_told() -> None:
    with pytest.raises(UsageError, match="expected one of cross_entropy, nll, mse"):
        losses.named("crossentropy")
    with pytest.raises(UsageError, match="got a dict, expected a function"):
        losses.named(f"{HERE}:no_module")


# Optimizers


def optimizer_of(name: str, arguments: dict[str, Any]) -> Optimizer:
    made = optimizers.named(name, arguments)
    assert not isinstance(made, Optimizer)
    return made(command_models.net)


def test_optimizers_by_name_and_import_path() -> None:
    for name in ("sgd", "SGD", "torch.optim:SGD", f"{HERE}:sgd"):
        made = optimizer_of(name, {"lr": 0.5})
        assert type(made) is torch.optim.SGD and made.param_groups[0]["lr"] == 0.5


def test_optimizers_that_can_not_be_made_are_told() -> None:
    with pytest.raises(UsageError, match="expected one of ASGD"):
        optimizers.named("sgdd", {})
    for name, arguments, told in (
        ("sgd", {"rate": 1}, "unexpected keyword argument 'rate'"),
        ("sgd", {"lr": -1}, "Invalid learning rate"),
        (f"{HERE}:no_model", {}, "takes 0 positional arguments"),
        ("builtins:repr", {}, "gave str, expected a torch.optim.Optimizer"),
    ):
        with pytest.raises(UsageError, match=told):
            optimizer_of(name, arguments)


# Checkpoints


class Evil:
    """An object that runs a command when it is unpickled."""

    def __reduce__(self) -> Any:
        return (os.mkdir, ("evil",))


def test_a_pickle_that_runs_code_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = command_models.mlp()
    torch.save({**model.state_dict(), "evil": Evil()}, "evil.pt")
    with pytest.raises(UsageError, match=r"refused.*asks for \w+\.mkdir.*--trust-checkpoint"):
        checkpoints.load(model, "evil.pt")
    assert not Path("evil").exists()
    with pytest.raises(UsageError):  # trusted, it runs, and what it leaves is no weight
        checkpoints.load(model, "evil.pt", trusted=True)
    assert Path("evil").exists()


@pytest.mark.parametrize("wrap", ["plain", "safetensors", "lightning", "ddp", "whole"])
def test_weights_of_any_loop_are_found(wrap: str, tmp_path: Path) -> None:
    trained, model = command_models.mlp(), command_models.mlp()
    state, file = trained.state_dict(), tmp_path / f"weights.{wrap}"
    if wrap == "safetensors":
        pytest.importorskip("safetensors.torch").save_file(state, file)
    elif wrap == "lightning":
        torch.save({"epoch": 3, "state_dict": {f"model.{k}": v for k, v in state.items()}}, file)
    elif wrap == "ddp":
        torch.save({f"module.{k}": v for k, v in state.items()}, file)
    else:
        torch.save(state if wrap == "plain" else trained, file)
    checkpoints.load(model, str(file), trusted=wrap == "whole")
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_a_half_written_checkpoint_is_told(suffix: str, share: float, tmp_path: Path) -> None:
    model, file = command_models.mlp(), tmp_path / f"weights.{suffix}"
    if suffix == "safetensors":
        pytest.importorskip("safetensors.torch").save_file(model.state_dict(), file)
    else:
        torch.save(model.state_dict(), file)
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
    with pytest.raises(UsageError, match=r"can't be read .*: it is damaged, unfinished") as caught:
        checkpoints.load(model, str(file))
    assert "\n" not in str(caught.value)


def test_a_text_is_no_checkpoint_and_nobody_advises_to_run_it(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("# It was a dark night.")
    with pytest.raises(UsageError, match="can't be read") as caught:
        checkpoints.load(command_models.mlp(), str(tmp_path / "book.txt"))
    assert "weights_only" not in str(caught.value)


def test_weights_that_do_not_fit_are_told(tmp_path: Path) -> None:
    model, file = command_models.mlp(), tmp_path / "weights.pt"
    state: dict[str, Any] = dict(command_models.mlp().state_dict())
    state["1.weight"] = torch.ones(2, 2)
    state["x.y"] = state.pop("3.bias")
    torch.save(state, file)
    with pytest.raises(UsageError) as caught:
        checkpoints.load(model, str(file))
    told = str(caught.value)
    assert "does not fit Sequential" in told and "--model-args" in told and "\n" not in told
    assert all(key in told for key in ("3.bias", "x.y", "1.weight"))
    torch.save({"epoch": 3}, file)
    with pytest.raises(UsageError, match="got a dict of 'epoch', expected a state dict"):
        checkpoints.load(model, str(file))
    with pytest.raises(UsageError, match="there is no such file"):
        checkpoints.load(model, str(tmp_path / "none.pt"))


# Hugging Face

SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 90,
    "max_position_embeddings": 32,
}
GPT = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 90, "n_positions": 32}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 90}
VIT = {**SMALL, "image_size": 16, "patch_size": 8}


def hf(tmp_path: Path, architecture: str | None, content: dict[str, Any]) -> str:
    names = {} if architecture is None else {"architectures": [architecture]}
    (tmp_path / "config.json").write_text(json.dumps({**names, **content}))
    return f"hf:{tmp_path}"


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("architecture", "content"),
    [
        ("GPT2LMHeadModel", {**GPT, "bos_token_id": 0, "eos_token_id": 0}),
        ("LlamaForCausalLM", SMALL),
        ("BertForMaskedLM", SMALL),
        ("RobertaForMaskedLM", SMALL),
        ("BertForSequenceClassification", {**SMALL, "num_labels": 1}),
        ("BertForSequenceClassification", {**SMALL, "num_labels": 3}),
        ("BertForTokenClassification", SMALL),
        ("BertForQuestionAnswering", SMALL),
        ("T5ForConditionalGeneration", {**T5, "decoder_start_token_id": 0}),
        ("ViTForImageClassification", VIT),
    ],
)
def test_heads_get_the_labels_that_they_want(
    architecture: str, content: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    with seeded(0):
        model = models.build(hf(tmp_path, architecture, content), {})
        found = batches_of(model)
        loss = losses.own_loss(model, found.batches[0])
    assert found.loss is None and bool(loss.isfinite()) and loss.requires_grad
    assert float(loss.detach()) > 0


def test_configurations_that_can_not_be_used_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    Path("evil.py").write_text("import os; os.mkdir('evil')")
    for architecture, content, told in (
        ("EvilModel", {"auto_map": {"AutoModel": "evil.EvilModel"}}, "code of its own"),
        ("BertForMaskedLM", {"_attn_implementation": "evil/kernel"}, "'evil/kernel', code from"),
        (
            "BertForMaskedLM",
            {"vision": {"attn_implementation": {"text": "evil/kernel"}}},
            "code from the hub",
        ),
        ("NoSuchModel", {}, "its architectures are ['NoSuchModel']"),
        ("PretrainedConfig", {}, "expected one class of transformers"),
        (None, {}, "its architectures are []"),
        (None, {"model_type": "gpt2"}, 'such as "architectures": ["GPT2LMHeadModel"]'),
        ("BertForMaskedLM", {"hidden_size": 5, "num_attention_heads": 2}, "can't be made of it"),
    ):
        with pytest.raises(UsageError) as caught:
            models.build(hf(tmp_path, architecture, content), {})
        assert told in str(caught.value)
    with pytest.raises(UsageError, match="code from the hub"):
        models.build(hf(tmp_path, "BertForMaskedLM", {}), {"attn_implementation": "evil/kernel"})
    Path("config.json").write_text('{"architectures": ')
    with pytest.raises(UsageError, match="is no JSON"):
        models.build(f"hf:{tmp_path}", {})
    with pytest.raises(UsageError, match="nothing is downloaded"):
        models.build("hf:bert-base-uncased", {})
    assert not Path("evil").exists()


def test_a_model_without_a_head_is_told(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = models.build(hf(tmp_path, "BertModel", SMALL), {})
    with pytest.raises(UsageError, match="BertModel: expected a head that gives a loss"):
        batches_of(model)


def test_text_by_the_tokenizer_beside_the_configuration(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "to", "be", "or", "not"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    (tmp_path / "text").write_text("to be or not to be " * 30)
    name = hf(tmp_path, "BertForMaskedLM", {**SMALL, "model_type": "bert"})
    model = models.build(name, {})
    found = batches_of(model, model=name, data=f"text:{tmp_path / 'text'}")
    seen = torch.cat([batch["input_ids"].flatten() for batch in found.batches])
    assert set(seen.tolist()) <= {0, 2, 3, 5, 6, 7, 8}  # 0 hides words
    assert {5, 6, 7, 8} <= set(seen.tolist())
