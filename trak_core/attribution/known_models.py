"""Keep for which language models one pass gave autograd's gradients, and compare less then."""

import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trak_core.attribution.device import device_name
from trak_core.attribution.loaded_model import LoadedModel
from trak_core.dependency_digests import code_files, content_digest
from trak_core.errors import InputError
from trak_core.gradients import (
    Batch,
    GradientMethod,
    choose_method,
    gradient_method,
    gradients_at_once,
    gradients_in_turn,
)
from trak_core.model_outputs.model_output import IGNORED, ModelOutput
from trak_core.spec import FeaturesSpec
from trak_core.system.files import CONFIG_RECORD, file_digest, read_record, write_record

_RECORD = "one_pass.json"
# The oldest go.
_MOST_KEYS = 200
# Tokens of a short text from its first that counts. Below some 30 a large model's time is that of
# its weights.
_SHORT = 16
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def known_or_compared(
    loaded: LoadedModel,
    few: Batch,
    spec: FeaturesSpec,
    artifact: Path,
    *,
    reads_terms: bool = False,
) -> GradientMethod:
    """Return the method of ``gradient_method``, at less cost if an earlier job of the run kept it.

    The comparison takes as long as several samples do, which is much of a job of few texts under a
    large model. It is made again in every job, with the job's own weights and texts, so that no
    number rests on the record alone. For a model on record it takes the texts' beginnings.

    The record lies in the results folder that ``artifact`` is written to. It has how long texts
    were for which one pass gave a model's gradients. Where none is longer now, their beginnings are
    compared, and whole ones after all if those say anything else. All that may decide it, except
    the numbers in weights and texts, must be the same.

    Args:
        loaded: The model.
        few: The job's samples to compare, one at least.
        spec: What decides the job's numbers.
        artifact: The file that the job will write.
        reads_terms: As ``choose_method`` takes it.
    """
    given = loaded.model, loaded.parameters, loaded.output
    choose = partial(choose_method, *given, reads_terms=reads_terms)
    pair = few.rows(slice(0, 2))
    short, record = _beginnings(pair, loaded.output), _record_beside(artifact)
    if short is None or record is None:
        return gradient_method(*given, few, reads_terms=reads_terms)
    n_tokens, known = pair.labels.shape[1], read_record(record)
    # What holds for two samples holds for one.
    key, *of_more = (_key(loaded, pair, n, spec) for n in range(len(pair), 3))
    if n_tokens <= max(known.get(each, 0) for each in (key, *of_more)):
        with suppress(Exception):  # whole texts say what is wrong
            method, notice = choose(short)
            if _is_one_pass(method, notice):
                return method
    method, notice = choose(few)
    if notice is not None:
        print(f"Notice: {notice}", flush=True)
    if _is_one_pass(method, notice) and n_tokens > known.get(key, 0):
        kept = list({**known, key: n_tokens}.items())[-_MOST_KEYS:]
        with suppress(InputError):  # where nothing can be kept, the next job compares again
            write_record(record, dict(kept))
    return method


def _is_one_pass(method: GradientMethod, notice: str | None) -> bool:
    """Return whether one pass gave what autograd gives, and there is nothing to tell."""
    return notice is None and method in (gradients_at_once, gradients_in_turn)


def _record_beside(artifact: Path) -> Path | None:
    """Return the record in an artifact's results folder; None where no start of a run has been."""
    folders = (folder for folder in artifact.parents if read_record(folder / CONFIG_RECORD))
    folder = next(folders, None)
    return None if folder is None else folder / _RECORD


def _beginnings(pair: Batch, output: ModelOutput) -> Batch | None:
    """Return texts cut behind their first labels that count; None where it isn't worth it."""
    if output.label_ndim != 1 or pair.labels.ndim != 2:
        return None
    counts = pair.labels[:, 1:] != IGNORED  # the first token is predicted by nothing
    n_tokens = pair.labels.shape[1]
    length = 1 + int(counts.int().argmax(dim=1).max()) + _SHORT if counts.numel() else n_tokens
    if not counts.any(dim=1).all() or 2 * length > n_tokens:
        return None
    if pair.lengths is None:
        lengths = torch.full_like(pair.labels[:, 0], n_tokens)
        sizes = {name: tensor.shape[1:2] for name, tensor in pair.tensors()}
        along = frozenset(name for name, size in sizes.items() if size == (n_tokens,))
        pair = replace(pair, lengths=lengths, along=along)
    return pair.cut(length)


def _key(loaded: LoadedModel, texts: Batch, n: int, spec: FeaturesSpec) -> str:
    """Return a digest of all that may decide how ``n`` texts are differentiated, except numbers."""
    model, named = loaded.model, [*loaded.model.named_parameters(), *loaded.model.named_buffers()]
    tensors = [
        [name, list(t.shape), str(t.dtype), str(t.device), t.stride(), t.requires_grad]
        for name, t in named
    ]
    inputs = [[name, tensor.ndim, str(tensor.dtype)] for name, tensor in texts.tensors()]
    machine = [torch.__version__, torch.get_num_threads(), device_name(loaded.device)]
    machine.append(torch.backends.cpu.get_cpu_capability())
    described = _ADDRESS.sub("", repr([model, *_configs(model)]))
    return content_digest(
        *(
            _code(),
            spec.study_digest,
            spec.model_output,
            list(loaded.parameters),
            tensors,
            described,
        ),
        *(dict(_sources(model)), machine, n, texts.gives_labels, inputs, loaded.blocks.is_on),
    )


@cache
def _code() -> str:
    """Return what changes with the size or the times of any file of the library.

    Reading them would take half a second.
    """
    stats = ((str(path), path.stat()) for path in code_files())
    return content_digest([[name, s.st_size, s.st_mtime_ns, s.st_ctime_ns] for name, s in stats])


def _configs(model: nn.Module) -> Iterator[Any]:
    """Yield the configs of transformers' models, and how each computes attention."""
    configs = {id(c): c for part in model.modules() if (c := getattr(part, "config", None))}
    for config in configs.values():
        yield config
        yield getattr(config, "_attn_implementation", None)


def _sources(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield modules that define a model's classes with their digests, and their packages."""
    for name in sorted({c.__module__ for part in model.modules() for c in type(part).__mro__}):
        package = name.partition(".")[0]
        yield package, str(getattr(sys.modules.get(package), "__version__", None))
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None and Path(file).is_file():
            yield f"{name}, file", file_digest(Path(file))
