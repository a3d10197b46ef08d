"""Compute per-sample gradients with respect to the weight of a convolution."""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv1d_weight, conv2d_weight, conv3d_weight

from trak_core.gradients.gradient_terms import (
    Contribution,
    Outer,
    add_product,
    pieces,
    prefers_inner_products,
)

# With at least this number of input channels, one matrix product for each position in the kernel
# takes less time than one product with copies of all image patches.
_CHANNELS_BY_POSITION = 8
# With at least this number of input channels, torch's functions ``_WEIGHT_GRADIENTS`` take less
# time than matrix products with image patches.
_CHANNELS_BY_TORCH = 4
_WEIGHT_GRADIENTS: list[Callable[..., Tensor]] = [conv1d_weight, conv2d_weight, conv3d_weight]


@dataclass(frozen=True, slots=True)
class Patches(Contribution):
    """Gradients with respect to a convolution's weight, shape (outputs, inputs / groups, *kernel).

    A convolution is a linear layer on patches of its input x (im2col, ``torch.nn.Unfold``). Let
    delta_t be the gradient with respect to pixel t of the output. The gradient of sample i is

        dW_i[o, c, k] = sum_t delta_t[o] x_{s t + d k}[c]    (stride s, dilation d)

    for output channel o, input channel c and kernel position k. Autograd's formula also sums over
    the samples i. Patches overlap, so copies of all patches would take much more memory than x.
    Therefore, patches are copied for some channels c at a time, or the formula is computed for one
    position k at a time, which needs no copies.

    ``gradients`` is delta for C outputs of B samples with V images each, shape
    (C, B, V, outputs, *output size).
    """

    images: Tensor  # x, shape (B, V, inputs, *size), with V images for each sample
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def matrix(self) -> tuple[int, int]:
        inputs = self.images.shape[2] // self.groups
        return self.gradients.shape[3], inputs * math.prod(self.kernel)

    def add_to(self, gramian: Tensor) -> None:
        c, b, v, outputs = self.gradients.shape[:4]
        inputs, window = self.images.shape[2] // self.groups, math.prod(self.kernel)
        n_pixels = v * math.prod(self.gradients.shape[4:])
        outputs //= self.groups
        if prefers_inner_products(c * b, n_pixels, inputs * window, outputs):
            for group in range(self.groups):
                patches = self._patches(group, slice(0, inputs)).transpose(-1, -2)
                gradients = self._gradients_of(group).transpose(-1, -2)
                Outer(gradients, patches, is_transposed=True).add_to(gramian)
        elif v == 1 and inputs >= _CHANNELS_BY_POSITION:
            for rows in self._by_kernel_position():
                add_product(gramian, rows)
        else:
            each = b * window * max(n_pixels, c * outputs)
            for group in range(self.groups):
                gradients = self._gradients_of(group)
                for part in pieces(inputs, each, gramian.device):
                    patches = self._patches(group, part)
                    rows = gradients @ patches.transpose(-1, -2)
                    add_product(gramian, rows.reshape(c * b, -1))

    def part(self, first: int, last: int) -> Tensor:
        inputs = self.images.shape[2] // self.groups
        c, _, v, outputs = self.gradients.shape[:4]
        is_cut = self.groups > 1 and last - first < outputs
        if c == v == 1 and inputs >= _CHANNELS_BY_TORCH and not is_cut:
            return self._by_torch(first, last)
        each = self.gradients.shape[3] // self.groups
        parts = []
        for group in range(first // each, -(-last // each)):
            own = slice(max(0, first - group * each), min(each, last - group * each))
            patches = self._patches(group, slice(0, inputs)).transpose(-1, -2)
            parts.append(self._gradients_of(group)[:, :, own] @ patches)
        return torch.cat(parts, dim=2).flatten(0, 1).flatten(1)

    def _by_torch(self, first: int, last: int) -> Tensor:
        """Return the gradients for output channels first, ..., last - 1, by ``torch.nn.grad``.

        The functions of ``torch.nn.grad`` sum over samples, but not over groups of channels.
        Therefore, the B samples are passed as channels of one image, in B x ``groups`` groups.
        """
        gradients, images = self.gradients[0, :, 0, first:last], self.images[:, 0]
        n_samples, outputs = gradients.shape[:2]
        size = (n_samples * outputs, images.shape[1] // self.groups, *self.kernel)
        images, gradients = (x.reshape(1, -1, *x.shape[2:]) for x in (images, gradients))
        settings = self.stride, self.padding, self.dilation, n_samples * self.groups
        grouped = _WEIGHT_GRADIENTS[len(self.kernel) - 1](images, size, gradients, *settings)
        return grouped.reshape(n_samples, -1)

    def _gradients_of(self, group: int) -> Tensor:
        """Return a group's output gradients, shape (C, B, outputs / groups, V x pixels)."""
        n = self.gradients.shape[3] // self.groups
        part = self.gradients[:, :, :, group * n : (group + 1) * n].flatten(4)
        return part.transpose(2, 3).flatten(3)

    def _patches(self, group: int, part: slice) -> Tensor:
        """Return copies of the patches of some channels of a group.

        ``part`` selects input channels of the group. The result has shape
        (B, channels x kernel positions, V x pixels).
        """
        first = group * (self.images.shape[2] // self.groups)
        images = self.images[:, :, first + part.start : first + part.stop]
        images = F.pad(images, [n for size in self.padding[::-1] for n in (size, size)])
        sizes, steps = self.gradients.shape[4:], images.stride()[-len(self.kernel) :]
        shape = *images.shape[:3], *self.kernel, *sizes
        by_kernel = [step * d for step, d in zip(steps, self.dilation, strict=True)]
        by_pixel = [step * s for step, s in zip(steps, self.stride, strict=True)]
        strides = *images.stride()[:3], *by_kernel, *by_pixel
        windows = images.as_strided(shape, strides, images.storage_offset())
        b, v = images.shape[:2]
        flat = windows.reshape(b, v, -1, math.prod(sizes))
        return flat.transpose(1, 2).flatten(2)

    def _by_kernel_position(self) -> Iterator[Tensor]:
        """Yield the gradients of the weights at each kernel position, shape (C B, entries).

        The output gradients are padded to the size of the input. Both images then have the same
        layout in memory. Therefore, the pixels to which a weight is applied are a slice of the
        flattened input. For a stride s, the input is split into s interleaved images, the phases,
        and the weight at kernel position k is applied to phase k mod s.
        """
        c, b, _, outputs = self.gradients.shape[:4]
        phases = self._phases()
        grid = phases.shape[-len(self.kernel) :]
        sizes = self.gradients.shape[4:]
        wider = [(0, width - size) for size, width in zip(sizes, grid, strict=True)]
        margins = [n for pair in wider[:0:-1] for n in pair]
        gradients = F.pad(self.gradients[:, :, 0], margins) if any(margins) else self.gradients
        gradients = gradients.reshape(c * b, outputs, -1)
        steps = [math.prod(grid[i + 1 :]) for i in range(len(grid))]
        length = 1 + sum(step * (size - 1) for step, size in zip(steps, sizes, strict=True))
        gradients = gradients[..., :length]
        n_outputs, n_inputs = outputs // self.groups, self.images.shape[2] // self.groups
        for position in itertools.product(*map(range, self.kernel)):
            moves = [at * d for at, d in zip(position, self.dilation, strict=True)]
            phase = tuple(move % s for move, s in zip(moves, self.stride, strict=True))
            start = sum(
                move // s * step for move, s, step in zip(moves, self.stride, steps, strict=True)
            )
            moved = phases[phase].flatten(2)[..., start : start + length].mT
            for group in range(self.groups):
                own = gradients[:, group * n_outputs : (group + 1) * n_outputs]
                seen = moved[..., group * n_inputs : (group + 1) * n_inputs]
                for part in pieces(n_inputs, c * b * n_outputs, own.device):
                    inputs = seen[..., part]
                    yield torch.bmm(own, inputs.repeat(c, 1, 1) if c > 1 else inputs).flatten(1)

    def _phases(self) -> Tensor:
        """Return the padded input, split by stride, shape (*stride, B, inputs, *size / stride)."""
        images = self.images[:, 0]
        margins = [
            (pad, pad + -(size + 2 * pad) % step)
            for size, pad, step in zip(images.shape[2:], self.padding, self.stride, strict=True)
        ]
        flat = [n for pair in margins[::-1] for n in pair]
        images = F.pad(images, flat) if any(flat) else images.contiguous()
        for i, step in enumerate(self.stride):
            images = images.unflatten(2 + 2 * i, (-1, step))
        n = len(self.stride)
        remainders = [3 + 2 * i for i in range(n)]
        return images.permute(*remainders, 0, 1, *(2 + 2 * i for i in range(n))).contiguous()
