"""Find out by trial which sample each entry of an operation's inputs belongs to."""

import math

import torch
from torch import Tensor

from trak_core.autograd.graph import Edge, Node, differentiate, shape_of
from trak_core.autograd.layouts import Layout, from_entries


def probed_layouts(edges: list[Edge], layouts: dict[int, Layout]) -> list[Layout | None]:
    """Return the layouts of an operation's inputs, from those of its outputs, by derivatives.

    Samples have numbers. For each bit there are two probes: random gradients of the samples with
    that bit, and of those without. An entry of an input belongs to sample b if it moves in exactly
    the probes in which b is, so that an operation that mixes samples is never taken for one that
    doesn't. An entry that never moves depends on nobody: the operation's derivative is zero there.

    Args:
        edges: All those of one operation, one at least.
        layouts: By number, those of the outputs that are used.

    Returns:
        One for each edge; None where an entry moves with several samples.
    """
    user = edges[0].user
    n_samples = next(iter(layouts.values())).n_samples
    owners = {edge.index: torch.zeros(shape_of(edge.node, edge.number)).long() for edge in edges}
    moves = {index: torch.zeros_like(own, dtype=torch.bool) for index, own in owners.items()}
    shared: set[int] = set()
    for bit in range((n_samples - 1).bit_length()):
        with_bit = (torch.arange(n_samples) >> bit) % 2 == 1
        first, second = (_moved(user, layouts, which, owners) for which in (with_bit, ~with_bit))
        for index, own in owners.items():
            own += first[index].long() << bit
            moves[index] |= first[index] | second[index]
            if bool((first[index] & second[index]).any()):
                shared.add(index)
    return [
        None if i in shared else from_entries(torch.where(moves[i], owners[i], -1), n_samples)
        for i in (edge.index for edge in edges)
    ]


def _moved(
    user: Node, layouts: dict[int, Layout], which: Tensor, inputs: dict[int, Tensor]
) -> dict[int, Tensor]:
    """Return which entries of inputs move with the samples for which ``which`` is true."""
    generator = torch.Generator().manual_seed(0)
    gradients: dict[int, Tensor] = {}
    for number, layout in layouts.items():
        about = user._input_metadata[number]
        n_entries = math.prod(about.shape)
        own = layout.of_blocks(layout.stride, n_entries // layout.stride)
        chosen = (which[own] & (own >= 0)).repeat_interleave(layout.stride)
        random = 1 + torch.rand(n_entries, generator=generator)
        gradient = torch.where(chosen, random, 0).view(shape_of(user, number))
        gradients[number] = gradient.to(about.device, about.dtype)
    with torch.no_grad():
        answers = differentiate(user, gradients)
    moved = {}
    for index, like in inputs.items():
        answer = answers[index]
        if answer is None:
            moved[index] = torch.zeros_like(like, dtype=torch.bool)
        else:
            moved[index] = (answer.sum_to_size(like.shape) != 0).cpu()
    return moved
