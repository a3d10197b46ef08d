"""Check a study before the first job: its functions, model, ids, labels, targets and checkpoints.

``config.preflight`` runs this module as a script in another process, so that Snakemake imports
neither torch nor the study's code. The script reads the arguments of ``preflight_study`` from a
JSON file, and writes the result to another JSON file.
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
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

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
from trak_core.runtime.job import quiet_libraries
from trak_core.settings import TRAIN, Weighting
from trak_core.settings.target_filter import Condition
from trak_core.study.as_read import lines_as_read
from trak_core.study.dataset_split import Split, users_code
from trak_core.study.given_data import check_repeatable
from trak_core.study.load_checkpoint import check_checkpoint
from trak_core.study.read_targets import split_of
from trak_core.study.sample_columns import columns_of
from trak_core.study.study import Study

_CPU = torch.device("cpu")
_LABEL_SECONDS = 10.0


class StudyModel:
    """A study's model on the CPU, for checking names, shapes and the number of classes.

    With ``without_numbers``, the model is built in torch's ``FakeTensorMode``. Fake tensors have
    shapes and dtypes but no storage, so that checking a large model takes little time and memory.
    Some models do not work with fake tensors, for example because of ``model.bfloat16()``, PEFT, or
    a forward pass that branches on values. If a call fails with fake tensors, it is repeated with
    the real model, so that users see only errors of the real model.
    """

    def __init__(self, study: Study, model_output: str, *, without_numbers: bool) -> None:
        self._study = study
        self._fake: FakeTensorMode | None = None
        if without_numbers and not about_output(model_output).needs_pairs:
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            with suppress(Exception), _quiet(), mode:
                self.module, self._fake = study.make_model().eval(), mode
        if self._fake is None:
            self.module = study.make_model().eval()

    def count_classes(self, output: ModelOutput, sample: Batch) -> int | None:
        """Call the model on a sample, and return the number of classes, or None without classes."""
        if self._fake is not None:
            with suppress(Exception), self._fake, _quiet():
                return count_classes(self.module, output, sample, _CPU)
            self.module, self._fake = self._study.make_model().eval(), None
        return count_classes(self.module, output, sample, _CPU)


@contextmanager
def _quiet() -> Generator[None, None, None]:
    """Silence log messages and warnings about operations that fake tensors do not support."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(disabled)


class _Copy:
    def __init__(self, stream: Any) -> None:
        self._stream, self.text = stream, ""

    def write(self, text: str) -> int:
        self.text += text
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _copied(copies: dict[str, str], split: str) -> Generator[None, None, None]:
    """Send text that is printed in the ``with`` block to standard error, and keep a copy of it.

    The copy is stored as ``copies[split]``, and printed by later runs that do not read the split.
    """
    copy = _Copy(sys.stderr)
    with redirect_stdout(cast(Any, copy)), redirect_stderr(cast(Any, copy)):
        yield
    copies[split] = copy.text


def _check_labels(
    split: Split, model: StudyModel, output: ModelOutput, n_classes: int | None
) -> list[int | float]:
    """Check the labels and shapes of the samples that can be read in ten seconds, in random order.

    The remaining samples are checked only by the jobs. If texts differ in length, the model is also
    called on the longest text that was read, because long texts can fail where short ones do not.

    Returns:
        The labels that were read, as numbers.
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
                print(f"Labels were checked for only some of the {len(split.ids)} samples.")
                return

    if shapes_of(checked_samples(), output).differ and longest:
        sample_id, sample = longest
        with naming_text(sample_id, sample.labels.shape[1]):
            model.count_classes(output, sample)
    return numbers


def _check_known_groups(
    group_by: Sequence[str], name: str, output: ModelOutput, labels: Sequence[int | float]
) -> None:
    if "label" in group_by:
        Grouping.of("label", labels)
    is_number = name in TABLE and not TABLE[name].labels_are_classes
    if "prediction" in group_by and (
        is_number or output.prediction is None or output.prediction is output.value
    ):
        raise InputError(
            "`groups` can contain `prediction` only if predictions are classes. Found the "
            f"model_output {name}, which predicts numbers. Instead, group by a column that "
            "train_columns() returns.",
            code="stages.prediction_groups",
        )


def _check_arguments(study: Study, arguments: Mapping[str, Any], requirement: str) -> None:
    signature = inspect.signature(study.function("train"))
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise InputError(
            f"{study.path}: {requirement}. Found train{signature}, which does not accept "
            f"{arguments}: {error}.",
            code="study.train",
        ) from None


def _check_training(
    study: Study, training: Mapping[str, Mapping[str, Any]], *, saves_several: bool
) -> None:
    """Raise an error if the study's ``train`` does not accept the arguments of every run.

    ``training`` contains the arguments by run. If a run saves several checkpoints
    (``saves_several``), ``train`` must be a generator.
    """
    train = study.function("train")
    if "at" in inspect.signature(train).parameters:
        raise InputError(
            f"{study.path}: train() must not have an argument `at`. In a config, `at` specifies "
            "the times at which a run saves checkpoints, and is not passed to train(). Rename the "
            "argument.",
            code="study.train",
        )
    for run, arguments in training.items():
        requirement = f"train() must accept the arguments of checkpoint {run} and of `training`"
        _check_arguments(study, dict(arguments), requirement)
    if saves_several and not inspect.isgeneratorfunction(inspect.unwrap(train)):
        raise InputError(
            f"{study.path}: to save several checkpoints of one run, train() must yield (time, "
            "model) at every time under `at`. Found no `yield` in train(). Write `yield epoch, "
            "model` in the training loop instead of `return model` at the end. If the loop is in "
            "another function, use `yield from`.",
            code="study.train",
        )


def _check_retraining(study: Study, arguments: Mapping[str, Any]) -> None:
    requirement = (
        "for an evaluation, train() must accept the arguments of `training`, `seed` (an integer) "
        "and `data` (the samples to train on; the default, None, means all samples)"
    )
    _check_arguments(study, {**arguments, "seed": 0, "data": None}, requirement)


def _check_checkpoints(
    study: Study, model: nn.Module, checkpoints: Mapping[str, Sequence[str | None]]
) -> list[str]:
    """Check that all checkpoints fit the model, and raise one error that lists all misfits.

    ``checkpoints`` maps each file to the keys of the state dicts in it, as in ``preflight_study``.

    Returns:
        The checkpoints whose weights transformers must rename when they are loaded.
    """
    problems, renamed = dict[str, str](), list[str]()
    notices = defaultdict[str, list[str]](list)
    for checkpoint, keys in checkpoints.items():
        for key in keys:
            try:
                is_renamed, notice = check_checkpoint(model, Path(checkpoint), key)
            except InputError as error:
                problems[checkpoint] = str(error)
                continue
            renamed += [checkpoint] if is_renamed else []
            notices[notice].append(checkpoint)
    for notice, paths in notices.items():
        if notice:
            print(f"Notice: {listed(paths)}: {notice}")
    if not problems:
        return renamed
    head = f"Every checkpoint must fit the model. Found {len(problems)} that do not:"
    lines = [*([head] if len(problems) > 1 else []), *problems.values()]
    ready = _ready_made(study)
    if ready and ready.classes_found and any("of another shape" in line for line in lines):
        lines.append(ready.classes_found)
    raise InputError("\n".join(lines), code="study.checkpoint_keys")


def _ready_made(study: Study) -> ReadyStudy | None:
    """Return the object of a ready-made study, or None if a user wrote the study."""
    ready = getattr(study.module, "study", None)
    return ready if isinstance(ready, ReadyStudy) else None


def _with_advice(error: InputError, study: Study) -> str:
    """Return an error's message, with advice for users of a ready-made study.

    They cannot change its functions, so the advice names the arguments to change.
    """
    message, ready = str(error), _ready_made(study)
    if ready:
        for advice in (CHANGE_SAMPLES, ONE_SHAPE):
            message = message.replace(advice, ready.to_change_samples)
        if error.code == "gradients.label_value":
            message += (
                " Set `classes` in study_arguments to the labels, in the order of the logits."
            )
    return message


def preflight_study(
    *,
    study_file: Path,
    model_output: str,
    weighting: str,
    parameter_patterns: Sequence[str] | None,
    training: dict[str, dict[str, Any]] | None,
    saves_several: bool = False,
    splits: dict[str, list[int | str] | None],
    questions: Mapping[str, str] = {},
    conditions: Mapping[str, str] = {},
    retraining: dict[str, Any] | None = None,
    describes: bool = False,
    checkpoints: Mapping[str, Sequence[str | None]] = {},
    without_numbers: bool = False,
    group_by: Sequence[str] = (),
) -> dict[str, Any]:
    """Build the model, read the data, and check that both fit the config.

    The first problem raises an error. Checkpoints come last, and one error lists all misfits.

    Args:
        study_file: The study's Python file.
        model_output: The name of the model output.
        weighting: The config's ``scoring.weighting``.
        parameter_patterns: Patterns for the names of the parameters to use. None means all.
        training: Arguments of the study's ``train`` for each run, or None if nothing is trained.
        saves_several: Whether a run saves checkpoints at several times.
        splits: The ids of the samples to read from each split, by the name of the split or the
            experiment. None means all samples.
        questions: The files that contain targets, by experiment.
        conditions: The conditions ``where`` by which targets are selected, by experiment.
        retraining: The arguments of ``train`` that all runs share, or None if nothing is retrained.
        describes: Whether the study must define ``describe``.
        checkpoints: The keys of the state dicts to use in each file. None means the default key.
            Only the names and shapes of weights are read.
        without_numbers: Whether to build the model with fake tensors if it supports them.
        group_by: The columns by which the training samples are grouped.

    Returns:
        A mapping with these keys:

        - ``n_params``: The number of selected parameters.
        - ``model_bytes``: The size of all parameters and buffers.
        - ``n_samples``: The number of samples in each split.
        - ``told``: The text that was printed about each split.
        - ``renamed``: The checkpoints whose weights transformers must rename.
    """
    study = Study.load(study_file)
    study.class_names()
    if training is not None:
        _check_training(study, training, saves_several=saves_several)
    if retraining is not None:
        _check_retraining(study, retraining)
    if describes and not study.has("describe"):
        raise InputError(
            f"{study.name}: for the baseline bm25, the study must define describe(sample), which "
            "returns a sample's text. Found no such function. Define it, or remove bm25 from "
            "`evaluation` in the config.",
            code="study.no_texts",
        )
    model = StudyModel(study, model_output, without_numbers=without_numbers)
    size = n_params(select_parameters(model.module, parameter_patterns))
    tensors = *model.module.parameters(), *model.module.buffers()
    model_bytes = sum(tensor.numel() * tensor.itemsize for tensor in tensors)
    n_samples, told = dict[str, int](), dict[str, str]()
    train = None
    if TRAIN not in splits and study.has("as_read"):
        with suppress(InputError):  # The training data may no longer exist.
            train = study.split(TRAIN, None)
    for name, targets in splits.items():
        source = "train_data()" if _ready_made(study) is None else "training data"
        where = source if name == TRAIN else f"experiment {name}"
        question = Path(questions[name]) if name in questions else None
        try:
            with _copied(told, name):
                split = split_of(study, name, targets, question)
                columns = columns_of(study, name, split.ids, question)
                if name == TRAIN:
                    check_groups(group_by, columns)
                if name in conditions:
                    Condition.parse(conditions[name]).check_columns(columns)
                output = named_output(model_output, model.module, split, _CPU, study, n_others=1)
                if weighting == Weighting.CURVATURE and output.curvature is None:
                    raise InputError(
                        "scoring.weighting can be curvature only if the model output defines the "
                        "second derivative of the loss. This is not the case for "
                        f"{model_output}. Set scoring.weighting to plain.",
                        code="config.weighting",
                    )
                labels = _check_samples(split, study, model, output)
                if name == TRAIN:
                    _check_known_groups(group_by, model_output, output, labels)
                    train = split
                subject = "training sample" if name == TRAIN else f"sample of {where}"
                lines = lines_as_read(study, split, f"The first {subject}", train)
                if name in {TRAIN, *questions} or len(lines) > 1:
                    print("".join(f"{line}\n" for line in lines), end="")
        except InputError as error:
            # The message of an error in a ready-made study already begins with the user's file.
            is_ready = str(error.code).startswith("studies.")
            prefix = "" if is_ready else f"{study.name}, {where}: "
            raise InputError(f"{prefix}{_with_advice(error, study)}", error.code) from error
        n_samples[name] = len(split.ids)
    renamed = _check_checkpoints(study, model.module, checkpoints)
    facts = {"n_params": size, "model_bytes": model_bytes, "n_samples": n_samples}
    return facts | {"told": told, "renamed": renamed}


def _check_samples(
    split: Split, study: Study, model: StudyModel, output: ModelOutput
) -> list[int | float]:
    """Check a split's samples, call the model on the first of them, and return labels."""
    first = as_batch(split.batch(0, 1), output)
    check_repeatable(split)
    is_text = first.labels.ndim == 2 and first.labels.shape[1] > 1
    with naming_text(split.ids[0], first.labels.numel()) if is_text else nullcontext():
        n_classes = model.count_classes(output, first)
    if study.has("describe"):
        with users_code(f"reading sample {split.ids[0]}"):
            sample = split.samples[0]
        study.describe(split.ids[0], sample)
    return _check_labels(split, model, output, n_classes)


def answer(request_file: str, answer_file: str, log_file: str) -> None:
    """Call ``preflight_study`` with the arguments that the JSON file ``request_file`` contains.

    The result or the error's message is written to ``answer_file`` as JSON. Printed text is written
    to ``log_file``.
    """
    log = os.open(log_file, os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    quiet_libraries()
    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    try:
        reply = preflight_study(**(request | {"study_file": Path(request["study_file"])}))
    except InputError as error:
        reply = {"refused": str(error)}
    Path(answer_file).write_text(json.dumps(reply), encoding="utf-8")


if __name__ == "__main__":
    answer(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # A normal exit would wait for threads that the study has started.
