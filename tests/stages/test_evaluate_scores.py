"""Evaluations agree with plain loops: own training, dense matrices, SciPy."""

import re
from contextlib import nullcontext
from dataclasses import replace

import h5py
import numpy as np
import pandas as pd
import pytest
import torch
from pipeline import read_scores
from refusals import preflight
from refused import refused
from small_run import N_TARGETS, PROJ_DIM, REPEATS, RETRAINED, STUDY, SUBSETS, loss_weights, stored

from trak_core.artifacts import ArtifactError
from trak_core.evaluation.baselines import bm25_scores
from trak_core.stages.retrain import retrain


@pytest.fixture(scope="module")
def evaluated(run):
    return run.evaluate(
        run.folder / "evaluation.h5",
        baselines=["random", "same_class", "gradient_dot", "embedding_cosine"],
        sweep={"damping": [0.1], "loss_weight_power": [1], "proj_dim": [20]},
        embeddings=run.embeddings(run.folder),
    )


def of_method(path, method, dim):
    table = pd.read_hdf(path, "targets")
    rows = table[(table["method"] == method) & (table["proj_dim"] == dim)]
    return rows["correlation"].to_numpy()


def test_retrained_models_are_trained_by_the_study(run):
    masks, outputs = run.truth()
    stored_masks, stored_outputs = (
        pd.concat([pd.read_hdf(path, key) for path in run.retrained])
        for key in ("masks", "outputs")
    )
    assert stored_masks.index.tolist() == list(range(SUBSETS))
    assert stored_masks.columns.tolist() == run.train.ids
    assert np.array_equal(stored_masks.to_numpy(), masks)
    assert stored_outputs.index.tolist() == [i for i in range(SUBSETS) for _ in range(REPEATS)]
    assert stored_outputs.columns.tolist() == run.pool
    values = stored_outputs[run.targets].to_numpy().reshape(outputs.shape)
    assert np.abs(values - outputs).max() < 1e-3


def test_grouping_of_subsets_changes_no_byte(run, tmp_path):
    whole = pd.read_hdf(run.retrain(3, 6, tmp_path), "outputs")
    parts = pd.concat([pd.read_hdf(path, "outputs") for path in run.retrained])
    assert whole.equals(parts.loc[3:6])


def test_lds_of_the_scores_is_scipys(run, evaluated):
    expected = run.lds(read_scores(run.scores))
    assert np.abs(of_method(evaluated, "scores", PROJ_DIM) - expected).max() < 1e-12
    summary = pd.read_hdf(evaluated, "summary")
    row = summary[summary["kind"] == "scores"].iloc[0]
    assert abs(row["lds"] - expected.mean()) < 1e-12
    with h5py.File(evaluated) as file:
        assert file.attrs["part_kept"] == run.truth()[0].mean()
    assert (summary["low"] <= summary["lds"]).all()
    assert (summary["lds"] <= summary["high"]).all()


def test_the_curve_is_from_one_checkpoint_to_all(run, evaluated, tmp_path):
    curve = pd.read_hdf(evaluated, "checkpoints").set_index("n_checkpoints")["lds"]
    assert curve.index.tolist() == [1, 2, 3]
    assert abs(curve[3] - run.lds(read_scores(run.scores)).mean()) < 1e-12
    first = run.with_checkpoints("c0").stages(tmp_path)
    assert abs(curve[1] - run.lds(read_scores(first)).mean()) < 1e-12


SETTING = ("damping", "combine", "loss_weight_power", "proj_dim")


def test_each_setting_of_the_sweep_agrees_with_a_run(run, evaluated, tmp_path):
    sweep = pd.read_hdf(evaluated, "sweep")
    assert len(sweep) == 2 * 2 * 3 * 2
    for i, row in sweep.sample(3, random_state=0).iterrows():
        setting = [row[key] for key in SETTING]
        expected = run.lds(read_scores(run.stages(tmp_path / str(i), *setting)))
        assert abs(row["lds"] - expected.mean()) < 1e-12
        assert abs(row["lds_chosen_by"] - expected[::2].mean()) < 1e-12
        assert abs(row["lds_reported"] - expected[1::2].mean()) < 1e-12


def test_normalize_changes_settings_but_not_the_baseline(run, evaluated, tmp_path):
    runs = {"a": ["c0", "c1"], "b": ["c2"]}
    run.stages(tmp_path / "own", normalize=True, runs=runs)
    normalized = run.evaluate(
        tmp_path / "evaluation.h5",
        stages=tmp_path / "own",
        baselines=["gradient_dot"],
        sweep={"damping": [0.1], "loss_weight_power": [], "proj_dim": [20]},
        spec=replace(run.spec, normalize=True, runs=runs),
    )
    ends = run.with_checkpoints("c1", "c2").stages(tmp_path / "ends", normalize=True)
    expected = run.lds(read_scores(ends))
    assert np.abs(of_method(normalized, "ends_of_runs", PROJ_DIM) - expected).max() < 1e-12
    # The curve begins with one checkpoint of each run.
    curve = pd.read_hdf(normalized, "checkpoints").set_index("n_checkpoints")["lds"]
    assert abs(curve[2] - expected.mean()) < 1e-12
    sweep = pd.read_hdf(normalized, "sweep")
    assert len(sweep) == 2 * 3 * 2
    for i, row in sweep.sample(3, random_state=0).iterrows():
        setting = [row[key] for key in SETTING]
        scores = run.stages(tmp_path / str(i), *setting, normalize=True)
        assert abs(row["lds"] - run.lds(read_scores(scores)).mean()) < 1e-12
    dots = [of_method(path, "gradient_dot", PROJ_DIM) for path in (normalized, evaluated)]
    assert np.array_equal(*dots)


def test_the_best_setting_and_the_configs_are_reported(evaluated):
    sweep, best = (pd.read_hdf(evaluated, key) for key in ("sweep", "best"))
    assert best["setting"].tolist() == ["best", "config"]
    assert best["lds_chosen_by"][0] == sweep["lds_chosen_by"].max()
    own = best.iloc[1]
    assert [own[key] for key in ("damping", "loss_weight_power", "proj_dim")] == [2, 0.5, PROJ_DIM]
    assert (best["low"] <= best["high"]).all()


def test_baselines_agree_with_plain_loops(run, evaluated):
    dots = [
        q[:, None] * (phi.astype(float) @ targets.astype(float).T)
        for q, phi, targets in zip(
            loss_weights(run), stored(run, "features"), stored(run, "features", "mine"), strict=True
        )
    ]
    expected = run.lds(np.mean(dots, axis=0))
    assert np.abs(of_method(evaluated, "gradient_dot", PROJ_DIM) - expected).max() < 1e-12

    images, labels = run.train.batch(0, len(run.train.ids))
    own_images, own_labels = run.study.split("mine", run.targets).batch(0, N_TARGETS)
    expected = run.lds((labels[:, None] == own_labels).numpy())
    assert np.abs(of_method(evaluated, "same_class", 0) - expected).max() < 1e-12

    cosines = []
    for path in run.checkpoints.values():
        model = run.study.make_model()
        model.load_state_dict(torch.load(path, weights_only=True))
        body = model.eval()[:-1]  # all but the last linear layer
        with torch.no_grad():
            pair = [body(x).double() for x in (images, own_images)]
        cosines.append(torch.cosine_similarity(pair[0][:, None], pair[1], dim=-1).numpy())
    lds = of_method(evaluated, "embedding_cosine", 0)
    assert np.abs(lds - run.lds(np.mean(cosines, axis=0))).max() < 1e-12
    assert "random" in pd.read_hdf(evaluated, "summary")["method"].tolist()


def test_bm25_is_a_baseline_of_studies_with_texts(run, tmp_path):
    text = 'f"digit {int(sample[1])}, " + "ink " * int(sample[0].sum() / 5)'
    study = tmp_path / "described.py"
    study.write_text(f"{STUDY.read_text()}\n\ndef describe(sample):\n    return {text}\n")
    path = run.evaluate(tmp_path / "words.h5", study_file=study, baselines=["bm25"])
    words = [
        [f"digit {int(y)} {'ink ' * int(x.sum() / 5)}".split() for x, y in zip(*batch, strict=True)]
        for batch in (run.train.batch(0, 150), run.study.split("mine", run.targets).batch(0, 5))
    ]
    scores = np.stack(list(bm25_scores(*words)), axis=1)
    assert np.abs(of_method(path, "bm25", 0) - run.lds(scores)).max() < 1e-12
    with refused("study.no_texts", str(STUDY)):
        preflight(STUDY, {}, describes=True)


def test_an_evaluation_is_written_to_the_same_bytes(run, tmp_path):
    first, second = (run.evaluate(tmp_path / name) for name in ("a.h5", "b.h5"))
    assert first.read_bytes() == second.read_bytes()
    with pd.HDFStore(first, "r") as store:
        assert "sweep" not in store


def user_file(run, path, change=lambda masks, outputs: (masks, outputs)):
    """Write retrained models with pandas, with columns in another order."""
    masks, outputs = run.truth()
    names = [f"subset-{i}" for i in range(SUBSETS)]
    masks = pd.DataFrame(masks.astype(bool), index=names, columns=run.train.ids)
    outputs = pd.DataFrame(
        np.concatenate([outputs[:, r] for r in range(REPEATS)]),
        index=names * REPEATS,
        columns=run.targets,
    )
    for key, frame in zip(
        ("masks", "outputs"), change(masks.iloc[:, ::-1], outputs.iloc[:, ::-1]), strict=True
    ):
        frame.to_hdf(path, key=key)
    return path


def test_the_ceiling_is_unknown_if_seeds_make_no_difference(run, tmp_path):
    path = tmp_path / "mine.h5"
    user_file(run, path, lambda m, o: (m, pd.concat([o[:SUBSETS]] * REPEATS)))
    evaluated = run.evaluate(tmp_path / "e.h5", [path], retrained_spec=None)
    assert "ceiling" not in pd.read_hdf(evaluated, "summary")["kind"].tolist()


def test_a_training_that_ignores_its_data_is_refused(tmp_path):
    study = tmp_path / "study.py"
    job = {"retrained": tmp_path / "r.h5", "study_file": study, "spec": RETRAINED, "code": "code"}
    ignores = STUDY.read_text().replace("    torch.manual_seed(seed)", "    data = train_data()")
    in_worker = """
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield data[0][0]
    assert len([*torch.utils.data.DataLoader(Stream(), num_workers=1)]) == 1"""
    for use in ("", "\n    len(data)", in_worker):
        study.write_text(ignores.replace("data=None):", f"data=None):{use}"))
        with nullcontext() if use else refused("study.train_data", str(study)):
            retrain(**job, batch_size=16, threads=1)


def test_a_users_retrained_models_give_the_same_results(run, evaluated, tmp_path):
    path = user_file(run, tmp_path / "mine.h5")
    files = run.evaluate(tmp_path / "e.h5", [path], retrained_spec=None), evaluated
    for method, dim in (("scores", PROJ_DIM), ("noise_ceiling", 0)):
        own, expected = (of_method(file, method, dim) for file in files)
        assert np.abs(own - expected).max() < 1e-12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m, o: (m * 2, o), "`masks`.* 2"),
        (lambda m, o: (m.iloc[:, 1:], o), "`masks`"),
        (lambda m, o: (m, o.iloc[:, 1:]), "`outputs`"),
        (lambda m, o: (m.rename(columns={m.columns[0]: 9999}), o), "`masks`.* 9999"),
        (lambda m, o: (m, o.iloc[1:]), "1 to 2 models"),
        (lambda m, o: (m.iloc[1:], o), "'subset-0'"),
        (lambda m, o: (m, o * np.nan), "'outputs'"),
        (lambda m, o: (m, o.assign(x="text")), "several dtypes"),
    ],
)
@pytest.mark.filterwarnings("ignore::pandas.errors.PerformanceWarning")
def test_wrong_files_of_retrained_models_are_refused(run, tmp_path, change, message):
    path = user_file(run, tmp_path / "mine.h5", lambda m, o: change(m.astype(int), o))
    code = "artifacts.frame" if "'outputs'" in message or "dtypes" in message else None
    with refused(code or "evaluation.retrained_models", re.compile(message)):
        run.evaluate(tmp_path / "e.h5", [path], retrained_spec=None)
    assert not (tmp_path / "e.h5").exists()


def test_models_retrained_for_another_config_are_refused(run, tmp_path):
    with pytest.raises(ArtifactError, match=r"Expected \{'seed': 5\}, found \{'seed': 4\}"):
        run.evaluate(tmp_path / "e.h5", retrained_spec=replace(RETRAINED, seed=5))
    with pytest.raises(ArtifactError, match=r"'loss_weight_power': 1"):
        run.evaluate(tmp_path / "e.h5", spec=replace(run.spec, loss_weight_power=1))
