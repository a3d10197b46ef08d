"""Check a study before any job: functions, model, ids, labels, targets, checkpoints.

As a script it reads a request in JSON from a file and answers in JSON, so that neither torch nor
the study's code is loaded into Snakemake, which keeps the answer (``config.preflight``).
"""

import inspect
import json
import logging
import os
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from trak_core.attribution.batch_by_length import naming_text
from trak_core.attribution.sample_outputs import model_output as named_output
from trak_core.errors import InputError, listed
from trak_core.gradients import (
    Batch,
    as_batch,
    check_labels,
    count_classes,
    n_params,
    select_parameters,
    shapes_of,
)
from trak_core.gradients.model_inputs import CHANGE_SAMPLES, ONE_SHAPE
from trak_core.lists.groups import Grouping, check_groups
from trak_core.model_outputs.about_outputs import TABLE, about_output
from trak_core.model_outputs.model_output import ModelOutput
from trak_core.ready_made.ready_study import ReadyStudy
from trak_core.spec import TRAIN, Weighting
from trak_core.spec.target_filter import Condition
from trak_core.study.dataset_split import Split, users_code
from trak_core.study.load_checkpoint import check_checkpoint
from trak_core.study.read_targets import split_of
from trak_core.study.sample_columns import columns_of
from trak_core.study.study import Study
from trak_core.system.job import quiet_libraries

_CPU = torch.device("cpu")


class StudyModel:
    """A study's model for a look at names, shapes and classes, in evaluation mode on the CPU.

    ``without_numbers`` saves time and memory where the model is large: torch's fake tensors have
    shapes and dtypes, and operations on them compute shapes. What they can't do is done with the
    model itself: a ``make_model`` or a forward pass that looks at numbers, or fails, and outputs
    that need embeddings. So all errors are the model's own.
    """

    def __init__(self, study: Study, model_output: str, *, without_numbers: bool) -> None:
        self._study = study
        self._mode: FakeTensorMode | None = None
        self.module = nn.Module()
        if without_numbers and not about_output(model_output).needs_pairs:
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            # Fake modules can't be moved to another dtype, and from_pretrained refuses torch's meta
            # device: each way builds what the other can't.
            for context in (torch.device("meta"), mode):
                with suppress(Exception), _quiet(), context:
                    self.module, self._mode = _fake(study.make_model().eval(), mode), mode
                    break
        if self._mode is None:
            self._take_numbers()

    def _take_numbers(self) -> None:
        self.module, self._mode = self._study.make_model().eval(), None

    def count_classes(self, output: ModelOutput, sample: Batch) -> int | None:
        """Return what ``trak_core.gradients.count_classes`` returns, or raise what it raises."""
        if self._mode is not None:
            with suppress(Exception), self._mode, _quiet():
                return count_classes(self.module, output, sample, _CPU)
            self._take_numbers()
        return count_classes(self.module, output, sample, _CPU)


def _fake(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Give a model fake tensors on the CPU; tied ones stay tied."""
    fakes: dict[int, Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None or isinstance(tensor, FakeTensor):
                    continue
                if id(tensor) not in fakes:
                    with mode:
                        fake = torch.empty(tensor.shape, dtype=tensor.dtype, device=_CPU)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    fakes[id(tensor)] = (
                        nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
                    )
                tensors[name] = fakes[id(tensor)]  # pyright: ignore[reportArgumentType]
    return model


@contextmanager
def _quiet() -> Generator[None, None, None]:
    """Silence torch's words about what fake tensors can't do."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


_LABEL_SECONDS = 10.0
_SHOWN = 8  # bad checkpoints whose messages are shown in full


def _check_split(
    split: Split, model: StudyModel, output: ModelOutput, n_classes: int | None
) -> list[int | float]:
    """Return the labels of as many samples as ten seconds allow, checked with their shapes.

    They are the numbers that tables have of them. Jobs check every sample again. Where texts differ
    in length, the longest that was read goes through the model.
    """
    numbers: list[int | float] = []
    longest: tuple[object, Batch] | None = None

    def checked_samples() -> Iterator[tuple[object, Batch]]:
        nonlocal longest
        began = time.monotonic()
        generator = torch.Generator().manual_seed(0)
        for i in torch.randperm(len(split.ids), generator=generator).tolist():
            sample = as_batch(split.batch(i, i + 1), output)
            yield split.ids[i], sample
            check_labels(sample.labels, output, n_classes, split.ids[i : i + 1])
            numbers.append(output.label_number(sample.labels[0]).item())
            if longest is None or sample.labels.numel() > longest[1].labels.numel():
                longest = split.ids[i], sample
            if time.monotonic() - began > _LABEL_SECONDS:
                print(f"Labels checked beforehand for a part of {len(split.ids)} samples only.")
                return

    if shapes_of(checked_samples(), output).differ and longest:
        sample_id, sample = longest
        with naming_text(sample_id, sample.labels.shape[1]):
            model.count_classes(output, sample)
    return numbers


def _check_known_groups(
    group_by: Sequence[str], name: str, output: ModelOutput, labels: Sequence[int | float]
) -> None:
    """Refuse ``label`` or ``prediction`` as groups where they are known to make none."""
    if "label" in group_by:
        Grouping.of("label", labels)
    is_number = name in TABLE and not TABLE[name].labels_are_classes
    if "prediction" in group_by and (
        is_number or output.prediction is None or output.prediction is output.value
    ):
        raise InputError(
            "groups: prediction must be a class to group by. Found that of model_output "
            f"{name}, a number. Let the study return a column of classes.",
            code="stages.prediction_groups",
        )


def _check_repeatable(split: Split, output: ModelOutput, first: Batch) -> None:
    """Refuse samples that come out otherwise when they are read again, as by augmentation."""
    again = as_batch(split.batch(0, 1), output)
    for (name, before), (_, after) in zip(first.tensors(), again.tensors(), strict=True):
        # NaN is not itself.
        if before.shape != after.shape or not ((before == after) | (before != before)).all():
            raise InputError(
                "A sample must be the same whenever it is read. Found two of "
                f"{split.ids[0]}, which differ in {name or 'the inputs'}. Take what is random out "
                "of the data, such as augmentation: prepare samples as in evaluation."
            )


def _check_training(study: Study, training: Mapping[str, Mapping[str, Any]]) -> None:
    """Compare every run's arguments with what ``train`` takes."""
    signature = inspect.signature(study.function("train"))
    if "at" in signature.parameters:
        raise InputError(
            f"{study.path}: train{signature} must call its argument `at` something else: in a "
            "config `at` says at which times a training leaves checkpoints."
        )
    for run, arguments in training.items():
        try:
            signature.bind(**arguments)
        except TypeError as error:
            raise InputError(
                f"{study.path}: train{signature} must take the arguments under `training` and "
                f"those of the checkpoint. Found {dict(arguments)} for checkpoint {run}: "
                f"{error}."
            ) from None


def _check_yields(study: Study) -> None:
    """Make sure that ``train`` leaves more than the model it ends with."""
    if not inspect.isgeneratorfunction(inspect.unwrap(study.function("train"))):
        raise InputError(
            f"{study.path}: for checkpoints from along a run (`at`), train() must yield (time, "
            "model) as it goes, at every time under `at`. Found no yield in it: write "
            "`yield epoch, model` into its loop, in place of `return model` at its end; or `yield "
            "from`, if the loop is in a function that it calls."
        )


def _check_retraining(study: Study, arguments: Mapping[str, Any], *, weighted: bool) -> None:
    """Make sure that ``train`` can be told what to train on, and with which seed."""
    signature = inspect.signature(study.function("train"))
    given = {**arguments, "seed": 0, "data": None}
    try:
        signature.bind(**given)
    except TypeError as error:
        raise InputError(
            f"{study.path}: for an evaluation, train{signature} must take the arguments under "
            "`training`, `seed` (an integer) and `data` (the samples to train on; all of them if "
            f"None, its default). Found {', '.join(given)}: {error}."
        ) from None
    if weighted and "sample_weights" not in signature.parameters:
        raise InputError(
            f"{study.path}: for evaluation.subsets.same_seeds, train{signature} must take "
            "`sample_weights`, a tensor by which it multiplies each sample's loss (None for 1, its "
            "default). Found no such argument.",
            code="study.no_sample_weights",
        )


def _check_weighting(weighting: str, name: str, output: ModelOutput) -> None:
    if Weighting(weighting) is Weighting.CURVATURE and output.curvature is None:
        raise InputError(
            "scoring.weighting can be curvature where the loss is a function of the model "
            f"output alone. Found model_output {name}, whose loss is not; set it to plain."
        )


def _check_checkpoints(
    model: nn.Module, checkpoints: Mapping[str, Sequence[str | None]]
) -> list[str]:
    """Return the checkpoints that transformers must rename; tell of all that don't fit."""
    problems, renamed = dict[str, str](), list[str]()
    notices = defaultdict[str, list[str]](list)
    for checkpoint, parts in checkpoints.items():
        for part in parts:
            try:
                checked = check_checkpoint(model, Path(checkpoint), part)
            except InputError as error:
                problems[checkpoint] = str(error)
                continue
            renamed += [checkpoint] if checked.is_renamed else []
            notices[checked.notice].append(checkpoint)
    for notice, paths in notices.items():
        if notice:
            print(f"Notice: {listed(paths)}: {notice}")
    if not problems:
        return renamed
    shown, others = list(problems.values())[:_SHOWN], list(problems)[_SHOWN:]
    if len(problems) > 1:
        shown.insert(0, f"Every checkpoint must fit the model. Found {len(problems)} that do not:")
    if others:
        shown.append(f"The others are {', '.join(others)}.")
    raise InputError("\n".join(shown))


def _ready_made(study: Study) -> ReadyStudy | None:
    """Return what a ready-made study consists of; None for a user's own."""
    consists = getattr(study.module, "study", None)
    return consists if isinstance(consists, ReadyStudy) else None


def _as_told(error: InputError, study: Study) -> str:
    """Return an error that says of a ready-made study's samples which argument changes them."""
    message, ready = str(error), _ready_made(study)
    if ready:
        for words in (CHANGE_SAMPLES, ONE_SHAPE):
            message = message.replace(words, ready.to_change_samples)
        if error.code == "gradients.label_value":
            message += " `classes` in study_arguments lists the labels in the order of the logits."
    return message


def preflight_study(
    *,
    study_file: Path,
    model_output: str,
    weighting: str,
    parameter_patterns: Sequence[str] | None,
    training: dict[str, dict[str, Any]] | None,
    leaves_several: bool = False,
    splits: dict[str, list[int | str] | None],
    shards: dict[str, int],
    questions: Mapping[str, str] = MappingProxyType({}),
    conditions: Mapping[str, str] = MappingProxyType({}),
    retraining: dict[str, Any] | None = None,
    weighted: bool = False,
    describes: bool = False,
    checkpoints: Mapping[str, Sequence[str | None]] = MappingProxyType({}),
    without_numbers: bool = False,
    group_by: Sequence[str] = (),
) -> dict[str, Any]:
    """Build the model, read the data, and compare them with the config.

    ``training`` has arguments of the study's ``train`` for each run, None if the checkpoints are
    there; ``leaves_several`` says whether trainings leave checkpoints on their way. ``splits`` to
    read have ids for an experiment, None for the training data and for all that a question's file
    has. ``retraining`` are arguments of ``train`` that all checkpoints share, if models are
    retrained, and ``weighted`` says whether by sample weights; ``describes`` whether samples must
    have texts. Keys and shapes of ``checkpoints`` are read, no numbers; each path comes with the
    state dicts that are taken of it, None for the usual one. ``without_numbers`` builds
    the model so too, if it can be. ``group_by`` are columns of the training samples, ``conditions``
    descriptions of experiments' targets. The first thing that doesn't hold is refused, and all
    checkpoints that don't fit.

    Returns:
        ``n_params``; ``model_bytes``, of all that the model holds; ``n_samples`` of each split;
        ``renamed``, the checkpoints whose weights transformers must rename.
    """
    study = Study.load(study_file)
    study.class_names()
    if training is not None:
        _check_training(study, training)
    if leaves_several:
        _check_yields(study)
    if retraining is not None:
        _check_retraining(study, retraining, weighted=weighted)
    if describes and not study.has("describe"):
        raise InputError(
            f"{study.name}: for bm25 among baselines of `evaluation`, the study must define "
            "describe(sample), which returns a sample's whole text. Found none. Define it, or "
            "leave bm25 out.",
            code="study.no_texts",
        )
    model = StudyModel(study, model_output, without_numbers=without_numbers)
    size = n_params(select_parameters(model.module, parameter_patterns))
    tensors = *model.module.parameters(), *model.module.buffers()
    size_bytes = sum(tensor.numel() * tensor.itemsize for tensor in tensors)
    n_samples: dict[str, int] = {}
    for name, targets in splits.items():
        own = "training data" if _ready_made(study) else "train_data()"
        where = own if name == TRAIN else f"experiment {name}"
        question = Path(questions[name]) if name in questions else None
        try:
            split = split_of(study, name, targets, question)
            columns = columns_of(study, name, split.ids, question)
            if name == TRAIN:
                check_groups(group_by, columns)
            if name in conditions:
                Condition.parse(conditions[name]).check_columns(columns)
            output = named_output(
                model_output, model.module, split, torch.device("cpu"), study, n_others=1
            )
            _check_weighting(weighting, model_output, output)
            first = as_batch(split.batch(0, 1), output)
            _check_repeatable(split, output, first)
            is_text = first.labels.ndim == 2 and first.labels.shape[1] > 1
            with naming_text(split.ids[0], first.labels.numel()) if is_text else nullcontext():
                n_classes = model.count_classes(output, first)
            labels = _check_split(split, model, output, n_classes)
            if name == TRAIN:
                _check_known_groups(group_by, model_output, output, labels)
            if name == TRAIN and (read := study.first_as_read(split)):
                print(f"The first training sample, {split.ids[0]}, as the model reads it: {read}")
            if study.has("describe"):
                with users_code(f"reading sample {split.ids[0]}"):
                    sample = split.samples[0]
                study.describe(split.ids[0], sample)
        except InputError as error:
            # A ready-made study names the user's own file; this one's is written by a start.
            is_ready = str(error.code).startswith("studies.")
            place = "" if is_ready else f"{study.name}, {where}: "
            raise InputError(f"{place}{_as_told(error, study)}", error.code) from error
        if shards[name] > len(split.ids):
            raise InputError(
                f"{where}: shards must not outnumber samples. Found {shards[name]} shards, "
                f"{len(split.ids)} samples."
            )
        n_samples[name] = len(split.ids)
    renamed = _check_checkpoints(model.module, checkpoints)
    sizes = {"n_params": size, "model_bytes": size_bytes}
    return {**sizes, "n_samples": n_samples, "renamed": renamed}


def answer(asked: str, reply_to: str, said: str) -> None:
    """Answer the request in one file into another: with sizes, or with what was refused and why.

    All that is printed goes to the file ``said``.
    """
    log = os.open(said, os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    quiet_libraries()
    request = json.loads(Path(asked).read_text(encoding="utf-8"))
    try:
        reply = preflight_study(**(request | {"study_file": Path(request["study_file"])}))
    except InputError as error:
        reply = {"refused": str(error)}
    Path(reply_to).write_text(json.dumps(reply), encoding="utf-8")


if __name__ == "__main__":
    answer(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # without waiting for threads that the study has left running
