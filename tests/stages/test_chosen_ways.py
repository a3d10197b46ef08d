"""A run's first job chooses the way to gradients; others of the same form take it from there."""

import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from pipeline import ON_CPU, features_spec, run_stages, scores_spec

from trak_core.attribution import chosen_ways
from trak_core.attribution.chosen_ways import RECORD, chosen_way, ways_of_run
from trak_core.attribution.deferred_logits import MarginsOfTokens
from trak_core.attribution.loaded_model import LoadedModel
from trak_core.gradients import gradients_at_once, gradients_in_turn, gradients_one_by_one
from trak_core.stages.compute_features import compute_features
from trak_core.stages.compute_token_scores import compute_token_scores
from trak_core.study.study import Study
from trak_core.system.files import CONFIG_RECORD, write_record

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
SETTINGS = {"model_output": "language_modelling", "damping": 0.5}


class Jobs:
    """Jobs of one study, and the number of texts in each comparison of ways."""

    def __init__(self, folder, monkeypatch, recurrent=""):
        self.folder, self.compared = folder, []
        self.study, self.file = folder / "study_of_ways.py", folder / RECORD
        write_record(folder / CONFIG_RECORD, {"config": {}})
        self.study.write_text(STUDY.replace("RECURRENT", recurrent))
        torch.manual_seed(0)
        names: dict[str, Any] = {"__name__": "study"}
        exec(self.study.read_text(), names)
        torch.save(names["make_model"]().state_dict(), folder / "c0.pt")
        choose = chosen_ways.choose_method

        def noted(model, parameters, output, samples, **more):
            self.compared.append(len(samples))
            return choose(model, parameters, output, samples, **more)

        monkeypatch.setattr(chosen_ways, "choose_method", noted)
        self.common = {"study_file": self.study, "checkpoint": folder / "c0.pt"}

    def features(self, targets=None, **changes):
        """Return the bytes of the features, and what was compared."""
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
        """Run the jobs before the one of scores of tokens, which is returned."""
        checkpoints, targets = {"c0": self.common["checkpoint"]}, ["a", "b"]
        results = self.folder / "results"
        scores = run_stages(results, self.study, checkpoints, targets, **SETTINGS, proj_dim=6)
        projection = {"kind": "rademacher", "proj_dim": 6, "seed": 0}
        return partial(
            compute_token_scores,
            token_scores=results / "token_scores/mine.h5",
            scores=scores,
            checkpoints=list(checkpoints.values()),
            train_paths=[results / "features/c0/train.h5"],
            targets_paths=[results / "features/c0/mine.h5"],
            normal_matrices=[results / "normal_matrix/c0.h5"],
            spec=scores_spec(checkpoints, targets, projection=projection, **SETTINGS),
            study_file=self.study,
            **ON_CPU,
        )

    def ways(self):
        spec = features_spec("language_modelling", 6)
        return sorted(name for name, _ in ways_of_run(self.folder, spec).values())


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    return Jobs(tmp_path, monkeypatch)


def test_jobs_take_what_was_chosen_and_write_the_same_bytes(jobs):
    asked = None, ["a", "b", "c"], ["e"]
    first = [jobs.features(targets) for targets in asked]
    assert [compared for _, compared in first] == [[5], [], [1]]
    assert jobs.ways() == ["gradients_at_once", "gradients_in_turn"]
    assert [jobs.features(targets) for targets in asked] == [(own, []) for own, _ in first]


def test_what_was_not_compared_is_compared_by_the_job(jobs, monkeypatch):
    jobs.features()
    # Different lengths bring a mask.
    assert jobs.features(["a", "e"])[1] == [2]
    assert jobs.features(code="other")[1] == [5]
    assert jobs.features()[1] == []
    assert jobs.features(study_digest="other")[1] == [5]
    assert jobs.features(parameter_patterns=["head.*"])[1] == [5]
    monkeypatch.setattr(torch, "__version__", "0")
    assert jobs.features()[1] == [5]


def test_logits_in_pieces_and_blocks_that_run_twice_are_compared(jobs, monkeypatch):
    jobs.features()
    spec = features_spec("language_modelling", 6)
    study = Study.load(jobs.study)
    loaded = LoadedModel.of_study(study, jobs.folder / "c0.pt", spec, torch.device("cpu"))
    (samples,) = loaded.ordered(study.split("train", None))
    few, _ = loaded.few(samples)
    ways = ways_of_run(jobs.folder, spec)
    assert chosen_way(loaded, few, ways) is gradients_at_once
    assert jobs.compared == []
    margins = MarginsOfTokens(loaded.model, loaded.output)
    in_pieces = replace(loaded, model=margins, output=margins.output)
    assert chosen_way(in_pieces, in_pieces.batch(samples, 0, 2), ways) is gradients_at_once
    assert jobs.compared == [2]
    monkeypatch.setattr(loaded.blocks, "is_on", True)
    assert chosen_way(loaded, few, ways) is gradients_at_once
    assert chosen_way(loaded, few, ways) is gradients_at_once
    assert jobs.compared == [2, 5]


def test_a_damaged_file_is_as_good_as_none(jobs):
    jobs.features()
    text = jobs.file.read_text()
    for damaged in ("", "{}", text.replace("at_once", "in_turn")):
        jobs.file.write_text(damaged)
        assert jobs.features()[1] == [5]
    assert {*json.loads(text)["known"]} == {"model", "ways"}


def test_without_a_results_folder_nothing_is_kept(jobs):
    (jobs.folder / CONFIG_RECORD).unlink()
    assert [jobs.features()[1], jobs.features()[1]] == [[5], [5]]
    assert not jobs.file.exists()


def test_other_jobs_take_it_too(jobs):
    compute = jobs.token_scores()
    jobs.compared.clear()
    compute()
    assert jobs.compared == []


HIDDEN = "self.lstm = torch.nn.LSTM(8, 8, batch_first=True)"


def test_a_notice_is_in_every_log_and_scores_of_tokens_need_factors(tmp_path, monkeypatch, capsys):
    """An LSTM hides samples. Plain autograd, which is faster for it, tells no tokens apart."""
    jobs = Jobs(tmp_path, monkeypatch, HIDDEN)
    reason = "cannot tell samples apart below: MkldnnRnnLayer"
    assert jobs.features()[1] == [5]
    assert reason in capsys.readouterr().out
    assert jobs.ways() == ["gradients_one_by_one"]
    assert jobs.features()[1] == []
    assert reason in capsys.readouterr().out

    compute, taken = jobs.token_scores(), []
    choose = chosen_ways.choose_method

    def noted(*given, **more):
        taken.append(choose(*given, **more)[0])
        return choose(*given, **more)

    monkeypatch.setattr(chosen_ways, "choose_method", noted)
    compute()
    assert taken == [gradients_in_turn, gradients_in_turn]
    assert gradients_one_by_one not in taken
