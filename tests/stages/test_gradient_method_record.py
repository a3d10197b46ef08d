"""A run's first job chooses the gradient method. Other jobs under the same conditions use it."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from pipeline import ON_CPU, features_spec, run_stages, scores_spec, token_scores

from trak_core.attribution import gradient_method_record
from trak_core.attribution.deferred_logits import MarginsOfTokens
from trak_core.attribution.gradient_method_record import RECORD, method_for, recorded_methods
from trak_core.attribution.loaded_model import LoadedModel
from trak_core.gradients import gradients_at_once, gradients_in_turn
from trak_core.runtime.files import CONFIG_RECORD, write_record
from trak_core.stages.compute_features import compute_features
from trak_core.study.study import Study

STUDY = """
import torch


class Texts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.head = torch.nn.Embedding(20, 8), torch.nn.Linear(8, 20)
        RECURRENT

    def forward(self, input_ids, attention_mask=None):
        x = self.tokens(input_ids)
        x = self.lstm(x)[0] if hasattr(self, "lstm") else x.cumsum(1).tanh()
        return self.head(x if attention_mask is None else x * attention_mask[..., None])


def make_model():
    return Texts()


def texts(n, n_tokens):
    drawn = torch.Generator().manual_seed(n)
    tokens = torch.randint(0, 20, (n, n_tokens), generator=drawn)
    return [{"input_ids": text, "labels": text} for text in tokens]


def train_data():
    return texts(5, 12)


def target_data():
    return [*texts(4, 8), *texts(3, 9)]


def target_ids():
    return list("abcdefg")
"""
SETTINGS = {"model_output": "language_modelling", "damping": 0.5, "proj_dim": 6}


class Jobs:
    """Jobs of one study, and of each comparison of methods the number of texts and the choice."""

    def __init__(self, folder, monkeypatch, recurrent=""):
        self.folder, self.compared, self.chosen = folder, [], []
        self.study, self.file = folder / "study_of_methods.py", folder / RECORD
        write_record(folder / CONFIG_RECORD, {"config": {}})
        self.study.write_text(STUDY.replace("RECURRENT", recurrent))
        torch.manual_seed(0)
        names: dict[str, Any] = {"__name__": "study"}
        exec(self.study.read_text(), names)
        torch.save(names["make_model"]().state_dict(), folder / "c0.pt")
        choose = gradient_method_record.choose_method

        def noted(model, parameters, output, samples, **more):
            self.compared.append(len(samples))
            method, notice = choose(model, parameters, output, samples, **more)
            self.chosen.append(method)
            return method, notice

        monkeypatch.setattr(gradient_method_record, "choose_method", noted)
        self.common = {"study_file": self.study, "checkpoint": folder / "c0.pt"}

    def features(self, targets=None, **changes):
        """Return the bytes of the features, and the comparisons."""
        more = {"split": "asked" if targets else "train", "targets": targets}
        job = ON_CPU | {"code": changes.pop("code", "code")}
        spec = replace(features_spec("language_modelling", 6, **more), **changes)
        file = self.folder / "features.h5"
        given = {"spec": spec, "targets": targets}
        compute_features(features=file, **given, **self.common, **job)
        compared = list(self.compared)
        self.compared.clear()
        return file.read_bytes(), compared

    def token_scores(self):
        """Run the jobs before the one of token scores, and return that one."""
        checkpoints, targets = {"c0": self.common["checkpoint"]}, ["a", "b"]
        results = self.folder / "results"
        run_stages(results, self.study, checkpoints, targets, **SETTINGS)
        spec = scores_spec(checkpoints, targets, **SETTINGS)
        return partial(token_scores, results, self.study, checkpoints, spec)

    def methods(self):
        spec = features_spec("language_modelling", 6)
        return sorted(name for name, _ in recorded_methods(self.folder, spec).values())


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    return Jobs(tmp_path, monkeypatch)


def test_jobs_use_the_recorded_method_and_write_the_same_bytes(jobs):
    asked = None, ["a", "b", "c"], ["e"]
    first = [jobs.features(targets) for targets in asked]
    assert [compared for _, compared in first] == [[5], [], [1]]
    assert jobs.methods() == ["gradients_at_once", "gradients_in_turn"]
    assert [jobs.features(targets) for targets in asked] == [(own, []) for own, _ in first]
    compute = jobs.token_scores()
    jobs.compared.clear()
    compute()
    assert jobs.compared == []


def test_a_job_compares_under_new_conditions(jobs, monkeypatch):
    jobs.features()
    # Texts of different lengths get a mask.
    assert jobs.features(["a", "e"])[1] == [2]
    assert jobs.features(code="other")[1] == [5]
    assert jobs.features()[1] == []
    assert jobs.features(study_digest="other")[1] == [5]
    assert jobs.features(parameter_patterns=["head.*"])[1] == [5]
    monkeypatch.setattr(torch, "__version__", "0")
    assert jobs.features()[1] == [5]


def test_logits_in_pieces_and_recomputed_blocks_are_conditions(jobs, monkeypatch):
    jobs.features()
    spec = features_spec("language_modelling", 6)
    study = Study.load(jobs.study)
    loaded = LoadedModel.of_study(study, jobs.folder / "c0.pt", spec, torch.device("cpu"))
    (samples,) = loaded.ordered(study.split("train", None))
    few, _ = loaded.few(samples)
    methods = recorded_methods(jobs.folder, spec)
    assert method_for(loaded, few, methods) is gradients_at_once
    assert jobs.compared == []
    margins = MarginsOfTokens(loaded.model, loaded.output)
    in_pieces = replace(loaded, model=margins, output=margins.output)
    batch = in_pieces.batch(samples, 0, 2)
    assert method_for(in_pieces, batch, methods) is gradients_at_once
    assert jobs.compared == [2]
    monkeypatch.setattr(loaded.blocks, "is_on", True)
    for _ in range(2):
        assert method_for(loaded, few, methods) is gradients_at_once
    assert jobs.compared == [2, 5]


def test_a_method_that_nobody_chose_is_not_used(jobs):
    """Records of other damage: library/test_data_files.py. Only results folders have a record."""
    jobs.features()
    jobs.file.write_text(jobs.file.read_text().replace("at_once", "in_turn"))
    assert jobs.features()[1] == [5]
    (jobs.folder / CONFIG_RECORD).unlink()
    jobs.file.unlink()
    assert [jobs.features()[1], jobs.features()[1]] == [[5], [5]]
    assert not jobs.file.exists()


HIDDEN = "self.lstm = torch.nn.LSTM(8, 8, batch_first=True)"


def test_every_log_has_the_notice_and_token_scores_need_terms(tmp_path, monkeypatch, capsys):
    """Plain autograd is chosen for an LSTM. It gives no terms."""
    jobs = Jobs(tmp_path, monkeypatch, HIDDEN)
    for compared in ([5], []):
        assert jobs.features()[1] == compared
        assert "apart in these operations: MkldnnRnnLayer" in capsys.readouterr().out
    assert jobs.methods() == ["gradients_one_by_one"]
    compute = jobs.token_scores()
    jobs.chosen.clear()
    compute()
    assert jobs.chosen == [gradients_in_turn, gradients_in_turn]
