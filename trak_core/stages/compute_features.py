"""Project the per-sample gradients of one split under one checkpoint."""

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trak_core.artifacts import FEATURE_SHARD, FEATURES, create, selected_ids, software
from trak_core.dependency_digests import content_digest
from trak_core.errors import InputError
from trak_core.gradients import (
    Batch,
    GradientMethod,
    Variety,
    check_labels,
    choose_method,
    gradient_method,
    gradients_at_once,
    gradients_in_turn,
    in_chunks,
)
from trak_core.model.device import device_name
from trak_core.model.features import batch_features, compilers, projecting_device, stored_rows
from trak_core.model.loaded_model import LoadedModel
from trak_core.model.sample_order import subset
from trak_core.model.sample_outputs import write_columns
from trak_core.model_outputs.model_output import IGNORED, ModelOutput
from trak_core.spec import TRAIN, FeaturesSpec, projection_of
from trak_core.study.read_split import with_flipped_labels
from trak_core.study.read_targets import split_of
from trak_core.system.files import CONFIG_RECORD, file_digest, read_record, write_record
from trak_core.system.progress import with_progress

# Texts are ordered by length within a window: its size in bytes of features, and in texts at least.
_WINDOW_BYTES, _LEAST_WINDOW = 2**24, 256
# For which models one pass gave autograd's gradients.
_RECORD = "one_pass.json"
# The oldest go.
_MOST_KEYS = 200
# Tokens of a short text from its first that counts. Below some 30 a large model's time is that of
# its weights.
_SHORT = 16
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def compute_features(
    *,
    features: Path,
    checkpoint: Path,
    study_file: Path,
    spec: FeaturesSpec,
    targets: Sequence[int | str] | None = None,
    question: Path | None = None,
    selected: Sequence[Path] = (),
    shard: int = 1,
    n_shards: int = 1,
    code: str,
    device: str,
    batch_size: int,
    memory_mb: int,
    threads: int,
) -> None:
    """Fold gradients and projection over the samples of one split, or of one shard of it.

    Shards count from 1 to ``n_shards``, on which the numbers don't depend, to float32 rounding. A
    file of ``selected`` targets has their ids, in place of ``targets``.
    """
    torch.set_num_threads(threads)
    loaded = LoadedModel.load(study_file, checkpoint, spec, projecting_device(device))
    parameters = loaded.parameters
    split = spec.split or TRAIN
    data = split_of(loaded.study, split, selected_ids(selected, spec) or targets, question)
    if spec.flipped is not None:
        data = with_flipped_labels(data, **spec.flipped)
    start, stop = (len(data.ids) * i // n_shards for i in (shard - 1, shard))
    if loaded.scales is not None:
        print(f"Gradients are divided by the root of the second moments in {checkpoint}")
    projection = projection_of(spec, [p.shape for p in parameters.values()])
    file_spec = loaded.file_spec(spec, projection.scaled())
    if n_shards > 1:
        made_of = {"samples": len(data.ids), "ids": content_digest(data.ids)}
        own = {"rows": [start, stop], "number": shard, "of": n_shards}
        file_spec["shard"] = own | {"made_of": made_of}
    kind = FEATURES if n_shards == 1 else FEATURE_SHARD
    where = device_name(loaded.device)
    print(
        f"{split}: samples {start} to {stop} of {len(data.ids)}, {projection.n_params} parameters "
        f"to {projection.proj_dim} dimensions ({projection.kind}"
        f"{'' if 'kind' in spec.projection else ', by their number'}), gradients on {where}",
        flush=True,
    )
    # Features of one window are in memory before they are written in the study's order.
    window = max(_LEAST_WINDOW, _WINDOW_BYTES // (4 * projection.proj_dim))
    (samples,) = loaded.ordered(subset(data, range(start, stop)), window=window)
    loaded = loaded.in_pieces(samples, memory_mb)
    model, output = loaded.model, loaded.output
    few, n_classes = loaded.few(samples)
    needed = loaded.memory(few, memory_mb)
    with samples.naming_longest():
        room = needed.room(loaded.device, memory_mb)
    chunk = min(batch_size, room.most(needed.longest))
    loaded.check_apart(few, chunk)
    method = known_or_compared(loaded, few, spec, features, code)
    taken = needed.of_longest.of(chunk) / 2**20
    print(f"{chunk} samples at once, about {taken:.3g} MiB together", flush=True)
    if samples.lengths is not None:
        most = min(batch_size, room.most(needed.shortest))
        lengths = f"{needed.shortest} to {needed.longest} tokens"
        print(f"texts of {lengths}: {most} of the shortest at once", flush=True)

    def computed(first: int, last: int) -> list[Tensor]:
        """Return the features of some samples to be stored, and what goes with each sample."""
        batch, ids = loaded.batch(samples, first, last), samples.split.ids[first:last]
        check_labels(batch.labels, output, n_classes, ids)
        given = model, parameters, output, batch
        rows, columns = batch_features(method, *given, projection, ids, threads, loaded.scales)
        return [torch.from_numpy(rows), *(column.cpu() for column in columns)]

    kept: list[Tensor] = []
    variety = Variety()
    ids = data.ids[start:stop]
    provenance = software(code, where, "torch", "numpy", *compilers(loaded.device))
    with create(features, kind, file_spec, provenance) as writer:
        names = range(projection.proj_dim)
        rows = writer.matrix("features", ids, names, dtype=np.dtype(spec.dtype))
        chunks = in_chunks(computed, len(ids), samples.batches_of(batch_size, room))
        done = with_progress(chunks, len(ids), "samples")
        for first, last, (exact, *columns) in samples.in_order(done):
            rows[first:last] = stored_rows(exact.numpy(), spec.dtype, ids[first:last])
            variety.add(exact.numpy())
            # Not a list of parts: small tensors that stay between large ones that go waste memory.
            kept = kept or [column.new_empty(len(ids)) for column in columns]
            for whole, part in zip(kept, columns, strict=True):
                whole[first:last] = part
        # A few that are alike may share a shard.
        variety.check(
            "training samples" if split == TRAIN else "targets",
            must_differ=split == TRAIN and n_shards == 1,
        )
        write_columns(writer, ids, kept, spec)


def known_or_compared(
    loaded: LoadedModel, few: Batch, spec: FeaturesSpec, artifact: Path, code: str
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
        code: Digest of the library's code that the job reaches.
    """
    given = loaded.model, loaded.parameters, loaded.output
    pair = few.rows(slice(0, 2))
    short, record = _beginnings(pair, loaded.output), _record_beside(artifact)
    if short is None or record is None:
        return gradient_method(*given, few)
    n_tokens, known = pair.labels.shape[1], read_record(record)
    # What holds for two samples holds for one.
    key, *of_more = (_key(loaded, pair, n, spec, code) for n in range(len(pair), 3))
    if n_tokens <= max(known.get(each, 0) for each in (key, *of_more)):
        with suppress(Exception):  # whole texts say what is wrong
            method, notice = choose_method(*given, short)
            if _is_one_pass(method, notice):
                return method
    method, notice = choose_method(*given, few)
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


def _key(loaded: LoadedModel, texts: Batch, n: int, spec: FeaturesSpec, code: str) -> str:
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
        *(code, spec.study_digest, spec.model_output, list(loaded.parameters), tensors, described),
        *(dict(_sources(model)), machine, n, texts.gives_labels, inputs, loaded.blocks.is_on),
    )


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
