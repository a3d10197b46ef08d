"""Small versions of common architectures, with random weights."""

import torch
from texts import VOCABULARY
from texts import gpt2 as gpt2
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    CLIPConfig,
    CLIPModel,
    ResNetConfig,
    ResNetForImageClassification,
)

TOKENS, CLASSES = 12, 5
STUDY = """
import models, torch

def make_model():
    return getattr(models, {name!r})().to(torch.{dtype})

def train_data():
    return [encode(i) for i in range({n_train})]

def target_data():
    return [encode(i) for i in range({n_train}, {n_train} + {n_targets})]

def encode(number):
    return models.sample({name!r}, number, torch.{dtype})
"""


class Segmenter(nn.Module):
    """Returns a dict with ``out``, as torchvision's segmentation models do."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.ReLU(inplace=True),
            nn.Conv2d(6, CLASSES, 1),
        )

    def forward(self, x):
        return {"out": self.net(x)}


class PositionalBert(nn.Module):
    """BERT whose positional inputs are token ids, segment ids and mask, in this order."""

    def __init__(self):
        super().__init__()
        self.bert = bert()

    def forward(self, input_ids, token_type_ids, attention_mask):
        return self.bert(
            input_ids=input_ids, token_type_ids=token_type_ids, attention_mask=attention_mask
        ).logits


_SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}


def resnet():
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
    config = ResNetConfig(**sizes, layer_type="basic", hidden_act="silu", num_labels=CLASSES)
    model = ResNetForImageClassification(config)
    # Statistics other than the initial 0 and 1.
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 2)
    return model


def bert():
    config = BertConfig(
        **_SMALL,
        vocab_size=VOCABULARY,
        num_attention_heads=2,
        max_position_embeddings=TOKENS,
        num_labels=CLASSES,
    )
    return BertForSequenceClassification(config)


def clip():
    heads = {**_SMALL, "num_attention_heads": 2}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    text = {**heads, **ids, "vocab_size": VOCABULARY, "max_position_embeddings": TOKENS}
    vision = {**heads, "image_size": 8, "patch_size": 4}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))


def images(n, seed=0):
    return torch.randn(n, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def classes(n, *shape, n_classes=CLASSES, seed=1):
    return torch.randint(n_classes, (n, *shape), generator=torch.Generator().manual_seed(seed))


def texts(n, seed=2):
    """Return token ids and attention masks; some texts are padded on the right, some are not."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(3, VOCABULARY, (n, TOKENS), generator=generator)
    lengths = torch.randint(TOKENS // 2, TOKENS + 1, (n, 1), generator=generator)
    mask = (torch.arange(TOKENS) < lengths).long()
    return input_ids * mask, mask


def sample(name, i, dtype):
    """Return sample ``i`` for a model: images in ``dtype``."""
    image, label = images(1, seed=i)[0].to(dtype), classes(1, seed=i)[0]
    input_ids, mask = (tensor[0] for tensor in texts(1, seed=i))
    text = {"input_ids": input_ids, "attention_mask": mask}
    return {
        "resnet": (image, label),
        "Segmenter": (image, classes(1, 8, 8, seed=i)[0]),
        "bert": {**text, "labels": label},
        "PositionalBert": (input_ids, torch.zeros_like(input_ids), mask, label),
        "gpt2": {**text, "labels": input_ids},
        "clip": {**text, "pixel_values": image},
    }[name]
