"""Public reports of the bugs in `reported.py`, by case.

Each thread is about the same mistake in another network. Bugs without an entry are those for which
no thread was found.
"""

_GITHUB = "https://github.com/"
_PATHS = {
    "mlp-sgd: layers in a list": "pytorch/pytorch/issues/666",
    "cnn-adam: layers in a list": "kanezaki/pytorch-unsupervised-segmentation/pull/6",
    "mlp-adam: a group of rate 0": "facebookresearch/maskrcnn-benchmark/issues/335",
    "mlp-adamw: bfloat16 weights, a tenth of the rate": "NVIDIA-NeMo/Automodel/pull/3444",
    "gpt-adamw: bfloat16 weights, rate 3e-5": "NVIDIA/apex/issues/1728",
    "deep-normed-sgd: body in evaluation mode": "ServiceNow/LCFCN/issues/20",
    "normed-sgd: batches of 3": "microsoft/CNTK/issues/905",
    "normed-regression-sgd: batches of 2": "xuebinqin/BASNet/issues/42",
    "dropped-adamw: keep for drop": "tensorpack/tensorpack/issues/786",
    "mlp-dropout-adamw: keep for drop": "v-iashin/CS231n/pull/8",
    "one-value-sgd: (B, 1) against (B,)": "pytorch/pytorch/issues/16045",
    "one-value-sgd: (B,) less (B, 1)": "manzilzaheer/DeepSets/pull/1",
    "cnn-adam: kl_div of a softmax": "sebastian-hofstaetter/matchmaker/issues/18",
    "two-circles-adamw: softmax over one unit": "marian-nmt/marian-dev/issues/21",
    "mlp-adam: softmax(dim=0)": "batra-mlp-lab/visdial-challenge-starter-pytorch/issues/1",
    "vit-adamw: log_softmax(dim=0)": "ctallec/world-models/issues/10",
    "regression-sgd: ReLU on the outputs": "tsinghua-rll/VoxelNet-tensorflow/issues/10",
    "gpt-adamw: labels not shifted": "KempnerInstitute/KempnerForge/issues/154",
    "lstm-adam-clipped: labels not shifted": "huggingface/transformers/pull/404",
    "gpt-adamw: no causal mask": "facebookresearch/xformers/issues/103",
    "lstm-adam-clipped: both directions": "timbmg/Sentence-VAE/issues/22",
    "heads-adamw: heads by view": "reczoo/FuxiCTR/issues/30",
    "branch-sgd: .data in a branch": "queenie88/A-GCN/issues/4",
    "mlp-momentum: one batch again and again": "ZhaoJ9014/face.evoLVe/pull/39",
    "mlp-sgd: sorted by label": "Deci-AI/super-gradients/issues/416",
    "cnn-sgd: sorted by label": "pytorch/vision/issues/7818",
    "mlp-adam: torch.rand": "AdaptInfer/Contextualized/issues/33",
    "cosines-adamw: no temperature": "ExplainableML/czsl/issues/30",
    "gpt-cosines-adamw: no temperature": "KevinMusgrave/powerful-benchmarker/issues/90",
    "vit-adamw: no positions": "DiffPoseTalk/DiffPoseTalk/issues/20",
    "first-word-adamw: no positions": "Lightning-AI/pytorch-lightning/pull/20099",
    "padded-lines-adamw: mask inverted": "InseeFrLab/torchTextClassifiers/pull/92",
}
SOURCES = {name: _GITHUB + path for name, path in _PATHS.items()} | {
    "rows-gru-adamw: no batch_first": "https://discuss.pytorch.org/t/lstm-change-batch-first-true-"
    "loss-does-not-decrease/62364",
    "two-circles-adamw: nn.Softmax behind one unit": "https://geek-questions.imtqy.com/articles/"
    "1270335/index.html",
}
