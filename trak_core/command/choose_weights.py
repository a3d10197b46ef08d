"""Choose the checkpoints of one network among files of weights."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from trak_core.config.checkpoint_list import grouped
from trak_core.errors import InputError, listed
from trak_core.study.load_checkpoint import read_weights
from trak_core.study.match_state_dict import shared_prefixes

ENDING = re.compile(r"\.(?:pt|pth|ckpt|bin|safetensors)(?:\.tar)?$", re.I)
# The shapes of tensors by their names, without the common prefix.
Shapes = Mapping[str, tuple[int, ...]]


def loadable(checkpoints: Iterable[Path], report: list[str]) -> dict[Path, Shapes]:
    """Return the tensor shapes in each checkpoint that can be loaded, without reading its values.

    For each other file, a line with the reason is added to ``report``.
    """
    loaded: dict[Path, Shapes] = {}
    for path in checkpoints:
        try:
            weights = read_weights(path)
        except InputError as error:
            report.append(f"left out: {error}")
            continue
        if weights.notice:
            report.append(f"found: {path}: {weights.notice}")
        prefix = shared_prefixes(weights.state)[-1]
        loaded[path] = {
            key.removeprefix(prefix): tuple(t.shape) for key, t in weights.state.items()
        }
    return loaded


def of_one_network(loaded: Mapping[Path, Shapes], report: list[str]) -> list[Path]:
    """Return the checkpoints of the most frequent network, sorted.

    Checkpoints with the same names and shapes of tensors belong to one network. A line is added to
    ``report`` for each other network.
    """
    networks = grouped(loaded, lambda path: frozenset(loaded[path].items()))
    first = max(networks, key=len)
    for network in networks:
        if network is not first:
            reason = f"of another network than {first[0]}, which has more files or comes first"
            report.append(f"left out: {listed(network)}: {reason}")
    return sorted(first)
