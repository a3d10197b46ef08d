"""Which images taught a network from timm to classify others? timm also reads the images.

This example needs timm and torchvision. It can run in any folder, in which it writes images and
weights to `timm-out`.
"""

from pathlib import Path

import timm
import torch
from PIL import Image
from sklearn.datasets import load_digits
from timm.data import create_transform, resolve_data_config
from timm.data.dataset import ImageDataset
from torch import nn

from trak_core import Attributor

words = ("zero", "one", "two")
for i, (pixels, digit) in enumerate(zip(*load_digits(n_class=3, return_X_y=True), strict=True)):
    path = Path("timm-out", "train" if i % 10 else "val", words[digit], f"{i}.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((pixels.reshape(8, 8) * 15).astype("uint8")).resize((32, 32)).save(path)

model = timm.create_model("test_resnet", pretrained=False, num_classes=3)
config = resolve_data_config({"input_size": (3, 32, 32)}, model=model)
evaluated = create_transform(**config)  # without augmentation, which fit() refuses
train, test = (ImageDataset(f"timm-out/{part}", transform=evaluated) for part in ("train", "val"))
checkpoints = []
for seed in (0, 1):
    torch.manual_seed(seed)
    model = timm.create_model("test_resnet", pretrained=False, num_classes=3)
    adam = torch.optim.Adam(model.parameters(), lr=0.003)
    for x, y in torch.utils.data.DataLoader(train, 10, shuffle=True):
        adam.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        adam.step()
    checkpoints.append(f"timm-out/seed{seed}.pth.tar")
    torch.save({"arch": "test_resnet", "state_dict": model.state_dict()}, checkpoints[-1])

scores = Attributor(model, "image_classification", checkpoints).fit(train).score(test)
for row in scores.top(1).head().itertuples():
    print(test.filename(row.target), "<-", train.filename(row.train), f"{row.score:.4f}")
