"""Later jobs of a model on record compare short texts: with the same bytes, and never on trust."""

import json
import os
from dataclasses import replace

import h5py
import numpy as np
import pytest
import torch
from pipeline import ON_CPU, features_spec, run_stages, scores_spec
from torch import nn

from trak_core.artifacts import FEATURES, open_artifact
from trak_core.attribution import known_models
from trak_core.attribution.known_models import _beginnings
from trak_core.gradients import Batch
from trak_core.model_outputs.language_modelling import LANGUAGE_MODELLING
from trak_core.model_outputs.supervised import CLASSIFICATION
from trak_core.stages.compute_distortion import compute_distortion
from trak_core.stages.compute_features import compute_features
from trak_core.stages.compute_token_scores import compute_token_scores
from trak_core.system.files import CONFIG_RECORD, write_record

# With the variable in the environment, which no digest sees, one pass is wrong for a batch.
STUDY = """
import os

import torch


class TextsOnRecord(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.head = torch.nn.Embedding(20, 8), torch.nn.Linear(8, 20)

    def forward(self, input_ids):
        x = self.tokens(input_ids).cumsum(1).tanh()
        if x.requires_grad and len(x) > 1 and "TRAK_TEST_WRONG" in os.environ:
            x.register_hook(lambda gradient: 2 * gradient)
        return self.head(x)


def make_model():
    return TextsOnRecord()


def texts(n, n_tokens):
    drawn = torch.Generator().manual_seed(n)
    tokens = torch.randint(0, 20, (n, n_tokens), generator=drawn)
    return [{"input_ids": text, "labels": text} for text in tokens]


def train_data():
    return texts(5, 48)


def target_data():
    return [*texts(4, 40), *texts(3, 90)]


def target_ids():
    return list("abcdefg")
"""


class Jobs:
    """Features jobs of one results folder, and the tokens of the texts that each has compared."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.results, self.compared = folder, folder / "results", []
        self.study = folder / "study_of_known_models.py"
        self.study.write_text(STUDY)
        self.record = self.results / "one_pass.json"
        write_record(self.results / CONFIG_RECORD, {"config": {}})
        for seed in (0, 1):
            torch.manual_seed(seed)
            model = nn.ModuleDict({"tokens": nn.Embedding(20, 8), "head": nn.Linear(8, 20)})
            torch.save(model.state_dict(), folder / f"c{seed}.pt")
        choose = known_models.choose_method

        def noted(model, parameters, output, samples, **more):
            self.compared.append(tuple(samples.labels.shape))
            return choose(model, parameters, output, samples, **more)

        monkeypatch.setattr(known_models, "choose_method", noted)

    def run(self, targets=None, checkpoint="c0", patterns=None, **settings):
        """Return the features file, written anew, and the shapes of labels that were compared."""
        split = "asked" if targets else "train"
        more = {"parameters": patterns, "split": split, "targets": targets}
        spec = features_spec("language_modelling", 6, checkpoint=checkpoint, **more)
        spec = replace(spec, study_digest=settings.pop("study_digest", "digest"))
        features = self.results / f"features/{checkpoint}/{split}.h5"
        features.unlink(missing_ok=True)
        files = {"features": features, "checkpoint": self.folder / f"{checkpoint}.pt"}
        given = {"spec": spec, "targets": targets, "study_file": self.study}
        self.compared.clear()
        compute_features(**files, **given, **ON_CPU | settings)
        return features, list(self.compared)

    def token_scores(self):
        """Return the file of the jobs whose scores are in the results folder, and the shapes."""
        checkpoints = {"c0": self.folder / "c0.pt"}
        given = checkpoints, ["a", "b"]
        if not (self.results / "scores/mine.h5").exists():
            run_stages(self.results, self.study, *given, **SETTINGS, proj_dim=6)
        path, own = self.results / "token_scores/mine.h5", self.results / "features/c0"
        path.unlink(missing_ok=True)
        self.compared.clear()
        compute_token_scores(
            token_scores=path,
            scores=self.results / "scores/mine.h5",
            checkpoints=list(checkpoints.values()),
            train_paths=[own / "train.h5"],
            targets_paths=[own / "mine.h5"],
            normal_matrices=[self.results / "normal_matrix/c0.h5"],
            spec=scores_spec(*given, projection=PROJECTION, **SETTINGS),
            study_file=self.study,
            **ON_CPU,
        )
        return path, list(self.compared)

    def distortion(self):
        """Return the file of a distortion job, and the shapes of labels that were compared."""
        path = self.results / "distortion/c0.h5"
        path.unlink(missing_ok=True)
        self.compared.clear()
        spec = features_spec("language_modelling", 6)
        given = {"checkpoint": self.folder / "c0.pt", "study_file": self.study, "n_streams": 2}
        compute_distortion(distortion=path, spec=spec, **given, **ON_CPU)
        return path, list(self.compared)


PROJECTION = {"kind": "rademacher", "proj_dim": 6, "seed": 0}
SETTINGS = {"model_output": "language_modelling", "damping": 0.5}
# By the job: the comparisons of whole texts, and those of a model on record.
OTHER_JOBS = {"token_scores": [(5, 48), (2, 40)], "distortion": [(5, 48)]}


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    return Jobs(tmp_path, monkeypatch)


def test_the_next_job_writes_the_same_bytes(jobs):
    for targets, n in ((None, 5), (["a", "b"], 2), (["e"], 1)):
        jobs.record.unlink(missing_ok=True)
        file, compared = jobs.run(targets)
        n_tokens = {5: 48, 2: 40, 1: 90}[n]
        assert compared == [(n, n_tokens)]
        whole = file.read_bytes()
        file, compared = jobs.run(targets)
        assert compared == [(min(n, 2), 17)]
        assert file.read_bytes() == whole


def test_another_checkpoint_and_shorter_texts_are_known(jobs):
    jobs.run()
    assert jobs.run(checkpoint="c1")[1] == [(2, 17)]
    assert jobs.run(["a", "b", "c"])[1] == [(2, 17)]
    assert jobs.run(["a"])[1] == [(1, 17)]


@pytest.mark.parametrize(
    "change",
    [
        {"study_digest": "other"},
        {"patterns": ["head.*"]},
        {"targets": ["e", "f"]},
        {"targets": ["a", "e"]},
        {"targets": ["e"]},
    ],
    ids=str,
)
def test_what_may_decide_has_whole_texts_compared(jobs, change):
    jobs.run()
    (compared,) = jobs.run(**change)[1]
    assert compared[1] == (90 if "e" in change.get("targets", ()) else 48)
    assert jobs.run(**change)[1] == [(min(2, compared[0]), 17)]


def test_other_code_buffers_and_settings_have_whole_texts_compared(jobs, monkeypatch):
    jobs.run()
    text = STUDY.replace("super().__init__()", "super().__init__(); self.config = {'heads': 2}")
    jobs.study.write_text(text)
    assert jobs.run()[1] == [(5, 48)]
    jobs.study.write_text(text.replace("': 2", "': 4"))
    assert jobs.run()[1] == [(5, 48)]
    jobs.study.write_text(text.replace(".tanh()", ".tanh().clone()"))
    assert jobs.run()[1] == [(5, 48)]
    monkeypatch.setattr(torch, "__version__", "0")
    assert jobs.run()[1] == [(5, 48)]
    monkeypatch.setattr(known_models, "_code", lambda: "other")
    assert jobs.run()[1] == [(5, 48)]
    assert jobs.run()[1] == [(2, 17)]


def features_in(file):
    with open_artifact(file, FEATURES) as artifact:
        return torch.from_numpy(artifact.matrix("features")[:])


def test_a_record_that_no_longer_holds_gives_no_wrong_gradient(jobs, monkeypatch, capsys):
    """One pass has become wrong, and nothing in the key shows it."""
    right = features_in(jobs.run()[0])
    monkeypatch.setenv("TRAK_TEST_WRONG", "1")
    file, compared = jobs.run()
    assert compared == [(2, 17), (5, 48)]
    torch.testing.assert_close(features_in(file), right, rtol=1e-5, atol=1e-5)
    assert "finite differences in float64 agree with autograd" in capsys.readouterr().out
    assert jobs.run(["a", "b"])[1] == [(2, 17), (2, 40)]


@pytest.mark.parametrize("job", OTHER_JOBS)
def test_other_jobs_use_the_record_of_features(jobs, job):
    """Their files are the same to the last bit, and without a record they leave one."""
    whole = OTHER_JOBS[job]
    run = getattr(jobs, job)
    run()
    jobs.record.unlink(missing_ok=True)
    file, compared = run()
    # The second side of the scores of tokens knows what the first one found.
    assert compared == [whole[0], *((2, 17) for _ in whole[1:])]
    written = file.read_bytes()
    assert jobs.run()[1] == [(2, 17)]
    jobs.record.unlink()
    jobs.run()
    file, compared = run()
    assert compared == [(2, 17) for _ in whole]
    assert file.read_bytes() == written


@pytest.mark.parametrize("job", OTHER_JOBS)
def test_a_model_that_is_wrong_now_is_compared_by_every_job(jobs, job, monkeypatch):
    """One pass has become wrong: numbers are those of autograd, not of the record."""
    run = getattr(jobs, job)
    with h5py.File(run()[0]) as file:
        right = numbers_in(file)
    monkeypatch.setenv("TRAK_TEST_WRONG", "1")
    file, compared = run()
    assert compared == [shape for whole in OTHER_JOBS[job] for shape in ((2, 17), whole)]
    with h5py.File(file) as file:
        np.testing.assert_equal(numbers_in(file).keys(), right.keys())
        for name, values in numbers_in(file).items():
            np.testing.assert_allclose(values, right[name], rtol=1e-4, atol=1e-5)


def numbers_in(file):
    """Return float arrays of a file by their names, and columns of its tables.

    Not those of tokens, which autograd, a sample at a time, can't tell apart.
    """
    arrays = {}

    def add(name, item):
        if isinstance(item, h5py.Dataset) and not name.startswith("tokens"):
            fields = item.dtype.names or [...]
            arrays.update({
                (name, str(field)): item[field] for field in fields if item[field].dtype.kind == "f"
            })

    file.visititems(add)
    assert arrays
    return arrays


def test_what_is_told_is_told_by_every_job(jobs, monkeypatch, capsys):
    monkeypatch.setenv("TRAK_TEST_WRONG", "1")
    for _ in range(2):
        assert jobs.run()[1] == [(5, 48)]
        assert "one sample at a time" in capsys.readouterr().out
    assert not jobs.record.exists()


def test_a_damaged_record_is_as_good_as_none(jobs):
    jobs.run()
    for text in ("", "{}", jobs.record.read_text().replace("48", "99")):
        jobs.record.write_text(text)
        assert jobs.run()[1] == [(5, 48)]
    assert list(json.loads(jobs.record.read_text())["known"].values()) == [48]


def test_a_file_of_the_library_that_changes_ends_what_the_record_says(jobs, tmp_path, monkeypatch):
    """By its size or its times; a new file counts too."""
    files = [tmp_path / "module.py"]
    files[0].write_text("a = 1\n")
    monkeypatch.setattr(known_models, "code_files", lambda: files)

    def compared():
        known_models._code.cache_clear()
        return jobs.run()[1]

    def replaced_as_cp_p_does():
        stat = files[0].stat()
        files[0].write_text("a = 3\n")
        os.utime(files[0], ns=(stat.st_atime_ns, stat.st_mtime_ns))

    whole, short = [(5, 48)], [(2, 17)]
    assert [compared(), compared()] == [whole, short]
    for change in (
        lambda: files[0].write_text("a = 22\n"),
        lambda: os.utime(files[0], ns=(0, 0)),
        replaced_as_cp_p_does,
        lambda: files.append(jobs.study),
    ):
        change()
        assert [compared(), compared()] == [whole, short]
    known_models._code.cache_clear()


def test_without_a_results_folder_nothing_is_kept(jobs):
    (jobs.results / CONFIG_RECORD).unlink()
    for _ in range(2):
        jobs.run()
        assert not jobs.record.exists()


def test_a_record_that_cannot_be_written_stops_no_job(jobs):
    jobs.record.mkdir()
    for _ in range(2):
        assert jobs.run()[1] == [(5, 48)]


def test_beginnings_reach_behind_the_first_labels_that_count():
    tokens = torch.arange(200).view(2, 100)
    labels = tokens.clone()
    labels[0, :31] = labels[1, :7] = -100
    mask = torch.ones(2, 100, 3)
    batch = Batch((), {"input_ids": tokens, "mask": mask, "size": torch.ones(2, 4)}, labels)
    short = _beginnings(batch, LANGUAGE_MODELLING)
    assert torch.equal(short.labels, labels[:, :47])
    assert [tuple(t.shape) for _, t in short.tensors()] == [(2, 47), (2, 47, 3), (2, 4)]
    labels[0, :40] = -100  # more than half would be left
    assert _beginnings(batch, LANGUAGE_MODELLING) is None
    labels[1] = -100
    assert _beginnings(batch, LANGUAGE_MODELLING) is None
    assert _beginnings(batch, CLASSIFICATION) is None
