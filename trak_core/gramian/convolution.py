"""What the weight of a convolution adds to a Gramian."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trak_core.gramian.contributions import Outer, add_product, pieces, prefers_inner_products


@dataclass(frozen=True, slots=True)
class Patches:
    """A convolution's weight of shape (outputs, inputs / groups, *kernel).

    A convolution is a linear layer on patches of its input. They overlap, so that all of them take
    much more memory than the input: they are formed for some channels at a time.

    Attributes:
        images: Shape (B, V, inputs, *size), V images a sample.
        gradients: Of the output, shape (C, B, V, outputs, *output size).
        kernel: Size of the kernel.
        stride: Step of the patches.
        padding: Zeros on both sides.
        dilation: Step within a patch.
        groups: Groups of channels that don't see each other.
    """

    images: Tensor
    gradients: Tensor
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def add_to(self, gramian: Tensor) -> None:
        """See ``Contribution``."""
        c, b, v, outputs = self.gradients.shape[:4]
        inputs, window = self.images.shape[2] // self.groups, math.prod(self.kernel)
        places = v * math.prod(self.gradients.shape[4:])
        outputs //= self.groups
        short = prefers_inner_products(c * b, places, inputs * window, outputs)
        each = b * window * max(places, c * outputs)
        for group in range(self.groups):
            gradients = self._gradients_of(group)
            if short:
                patches = self._patches(group, slice(0, inputs)).transpose(-1, -2)
                Outer(patches, gradients.transpose(-1, -2), is_turned=True).add_to(gramian)
                continue
            for part in pieces(inputs, each):
                patches = self._patches(group, part)
                rows = gradients @ patches.transpose(-1, -2)
                add_product(gramian, rows.reshape(c * b, -1))

    def rows(self) -> Tensor:
        """See ``Contribution``."""
        inputs = self.images.shape[2] // self.groups
        parts = [
            self._gradients_of(group) @ self._patches(group, slice(0, inputs)).transpose(-1, -2)
            for group in range(self.groups)
        ]
        return torch.cat(parts, dim=2).flatten(0, 1).flatten(1)

    def _gradients_of(self, group: int) -> Tensor:
        """Return one group's gradients, shape (C, B, outputs / groups, V x places)."""
        n = self.gradients.shape[3] // self.groups
        part = self.gradients[:, :, :, group * n : (group + 1) * n].flatten(4)
        return part.transpose(2, 3).flatten(3)

    def _patches(self, group: int, part: slice) -> Tensor:
        """Return patches of some channels of a group, (B, channels x window, V x places)."""
        first = group * (self.images.shape[2] // self.groups)
        images = self.images[:, :, first + part.start : first + part.stop]
        images = F.pad(images, [n for size in self.padding[::-1] for n in (size, size)])
        sizes = self.gradients.shape[4:]
        n_dims = len(self.kernel)
        steps = images.stride()[-n_dims:]
        windows = images.as_strided(
            (*images.shape[:3], *self.kernel, *sizes),
            (
                *images.stride()[:3],
                *(step * d for step, d in zip(steps, self.dilation, strict=True)),
                *(step * d for step, d in zip(steps, self.stride, strict=True)),
            ),
            images.storage_offset(),
        )
        b, v = images.shape[:2]
        flat = windows.reshape(b, v, -1, math.prod(sizes))
        return flat.transpose(1, 2).flatten(2)
