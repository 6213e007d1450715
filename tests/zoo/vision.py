"""torchvision's models as they are, on images as small as each can take."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchvision import models

from zoo.training import Specimen, Training, training

CLASSES = 10


def classified(make: Callable[[], nn.Module], *shape: int) -> Training:
    """Classification of noise of this shape."""

    def loss(model: nn.Module) -> Tensor:
        return functional.cross_entropy(
            model(torch.randn(shape)), torch.randint(CLASSES, shape[:1])
        )

    return training(make(), loss)


def segmented() -> Training:
    """A class for each pixel, from the main and the auxiliary head."""
    model = models.segmentation.deeplabv3_mobilenet_v3_large(
        weights_backbone=None, num_classes=CLASSES, aux_loss=True
    )

    def loss(model: nn.Module) -> Tensor:
        outputs, classes = model(torch.randn(2, 3, 64, 64)), torch.randint(CLASSES, (2, 64, 64))
        main, auxiliary = (functional.cross_entropy(outputs[k], classes) for k in ("out", "aux"))
        return main + 0.4 * auxiliary

    return training(model, loss)


def classifier(
    title: str, make: Callable[..., nn.Module], *shape: int, **kwargs: object
) -> Specimen:
    built = partial(classified, partial(make, num_classes=CLASSES, **kwargs), *shape)
    return Specimen(title, built)


TORCHVISION = {
    "resnet18": classifier("ResNet-18", models.resnet18, 4, 3, 32, 32),
    "densenet121": classifier("DenseNet-121", models.densenet121, 2, 3, 32, 32, drop_rate=0.1),
    "mobilenet_v3_small": classifier("MobileNetV3-small", models.mobilenet_v3_small, 4, 3, 64, 64),
    "efficientnet_b0": classifier("EfficientNet-B0", models.efficientnet_b0, 4, 3, 32, 32),
    "convnext_tiny": classifier("ConvNeXt-T", models.convnext_tiny, 2, 3, 32, 32),
    "regnet_y_400mf": classifier("RegNetY-400MF", models.regnet_y_400mf, 4, 3, 32, 32),
    "vit": classifier(
        "ViT, 2 blocks, 32 wide",
        models.VisionTransformer,
        *(4, 3, 32, 32),
        image_size=32,
        patch_size=8,
        num_layers=2,
        num_heads=4,
        hidden_dim=32,
        mlp_dim=64,
        dropout=0.1,
        attention_dropout=0.1,
    ),
    "swin_t": classifier("Swin-T", models.swin_t, 2, 3, 64, 64),
    "swin_v2_t": classifier("Swin-V2-T", models.swin_v2_t, 2, 3, 64, 64),
    "deeplabv3_mobilenet": Specimen("DeepLabV3, MobileNetV3-large", segmented),
    "r3d_18": classifier("R3D-18 (video)", models.video.r3d_18, 2, 3, 4, 32, 32),
}
