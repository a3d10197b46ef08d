"""The stages of an evaluation against plain loops: own training, dense matrices, scipy."""

import h5py
import numpy as np
import pandas as pd
import pytest
import torch
from pipeline import read_scores, run_stages
from scipy.stats import spearmanr
from torch.utils.data import Subset
from workspace import REPOSITORY

from trak_core.artifacts import ArtifactError
from trak_core.compat.score_computers import BasicScoreComputer
from trak_core.errors import InputError
from trak_core.provenance import ids_digest
from trak_core.stages.compare import compare_runs
from trak_core.stages.counterfactual import compare_removals
from trak_core.stages.embeddings import compute_embeddings
from trak_core.stages.evaluation import evaluate_scores
from trak_core.stages.features import compute_features
from trak_core.stages.mislabelled import find_mislabelled
from trak_core.stages.normal_matrix import compute_normal_matrix
from trak_core.stages.removals import retrain_without
from trak_core.stages.retrain import retrain_subsets
from trak_core.stages.self_influence import compute_self_influence
from trak_core.stages.train import train_checkpoint
from trak_core.study import Study
from trak_core.subsets import flipped_labels, random_half, training_seed

STUDY = REPOSITORY / "tests/studies/small_digits.py"
ARGUMENTS = {"steps": 8}
SEEDS = (0, 1, 2)
N_TARGETS, PROJ_DIM = 5, 40
SUBSETS, REPEATS = 9, 2
PROJECTION = {"kind": "rademacher", "proj_dim": PROJ_DIM, "seed": 0}
COMMON = {"model_output": "image_classification", "study": "digest", "parameter_patterns": None}
SETTINGS = {
    "damping": 2,
    "weighting": "plain",
    "combine": "product_of_averages",
    "loss_weight_power": 0.5,
}


def margin(logits, label):
    p = torch.softmax(logits.double(), -1)[..., label]
    return torch.log(p) - torch.log1p(-p)


class Run:
    """A finished run of the small study, and its retrained models."""

    def __init__(self, folder):
        self.folder = folder
        self.study = Study.load(STUDY)
        self.train = self.study.split("train", None)
        pool = self.study.function("target_ids")().tolist()
        self.pool, self.targets = pool, pool[3 : 3 + N_TARGETS]
        self.checkpoints = {f"c{seed}": folder / f"c{seed}.pt" for seed in SEEDS}
        for seed, path in zip(SEEDS, self.checkpoints.values(), strict=True):
            train_checkpoint(
                checkpoint=path, study=STUDY, arguments={**ARGUMENTS, "seed": seed}, threads=1
            )
        self.scores = self.stages(folder / "run")
        self.retrained = [self.retrain(0, 4), self.retrain(5, SUBSETS - 1)]

    def stages(self, results, damping=2, combine="product_of_averages", power=0.5, dim=PROJ_DIM):
        return run_stages(
            results,
            STUDY,
            self.checkpoints,
            self.targets,
            model_output="image_classification",
            proj_dim=dim,
            damping=damping,
            combine=combine,
            power=power,
        )

    def retrain(self, first, last, folder=None):
        path = (folder or self.folder) / f"{first}-{last}.h5"
        retrain_subsets(
            retrained=path,
            study=STUDY,
            arguments=ARGUMENTS,
            first=first,
            last=last,
            seeds=REPEATS,
            seed=4,
            model_output="image_classification",
            study_digest="digest",
            code="code",
            batch_size=16,
            threads=1,
        )
        return path

    def features(self, split):
        return [self.folder / f"run/features/{c}/{split}.h5" for c in self.checkpoints]

    def matrices(self):
        return [self.folder / f"run/normal_matrix/{c}.h5" for c in self.checkpoints]

    def evaluate(self, path, retrained=None, **changed):
        expected = {
            **COMMON,
            **SETTINGS,
            "projection": PROJECTION,
            "dtype": "float32",
            "targets_digest": ids_digest(self.targets),
            "experiment": "mine",
            "checkpoints": list(self.checkpoints),
        }
        asked = {
            "baselines": [],
            "trak": [],
            "sweep": None,
            "embeddings": [],
            "features": list(
                zip(self.features("train"), self.features("mine"), self.matrices(), strict=True)
            ),
            "expected_retrained": {"study": "digest", "seeds": REPEATS, "seed": 4},
        }
        evaluate_scores(
            evaluation=path,
            scores=self.scores,
            checkpoint_scores=[self.folder / f"run/scores/mine/{c}.h5" for c in self.checkpoints],
            retrained=retrained or self.retrained,
            expected={**expected, **changed.pop("expected", {})},
            expected_embeddings={
                **COMMON,
                "projection": {"kind": "embedding"},
                "dtype": "float32",
                "checkpoints": list(self.checkpoints),
            },
            code="code",
            memory_mb=300,
            **{**asked, **changed},
        )
        return path

    def truth(self):
        """Masks (S, n) and mean outputs (S, m), of models trained here, by hand."""
        if not hasattr(self, "_truth"):
            n = len(self.train.ids)
            masks = np.stack([random_half(n, i, seed=4) for i in range(SUBSETS)])
            split = self.study.split("mine", self.targets)
            images, labels = split.batch(0, N_TARGETS)
            outputs = np.empty((SUBSETS, REPEATS, N_TARGETS))
            for i, mask in enumerate(masks):
                for repeat in range(REPEATS):
                    model = self.study.function("train")(
                        **ARGUMENTS,
                        seed=training_seed(4, i, repeat),
                        data=Subset(self.train.samples, np.flatnonzero(mask).tolist()),
                    ).eval()
                    with torch.no_grad():
                        logits = model(images)
                    outputs[i, repeat] = [
                        margin(x, y).item() for x, y in zip(logits, labels, strict=True)
                    ]
            self._truth = masks.astype(float), outputs
        return self._truth

    def lds(self, scores):
        """Each target's correlation, by scipy in a loop."""
        masks, outputs = self.truth()
        sums, mean = masks @ np.asarray(scores, dtype=float), outputs.mean(axis=1)
        return np.array([spearmanr(sums[:, j], mean[:, j]).statistic for j in range(N_TARGETS)])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    torch.set_num_threads(1)
    return Run(tmp_path_factory.mktemp("evaluation"))


@pytest.fixture(scope="module")
def evaluated(run):
    embeddings = []
    for checkpoint, path in run.checkpoints.items():
        embeddings.append(run.folder / f"embeddings-{checkpoint}.h5")
        compute_embeddings(
            embeddings_file=embeddings[-1],
            checkpoint=path,
            study=STUDY,
            spec={**COMMON, "checkpoint": checkpoint},
            code="code",
            device="cpu",
            batch_size=7,
            threads=1,
        )
    return run.evaluate(
        run.folder / "evaluation.h5",
        baselines=["random", "same_class", "gradient_dot", "embedding_cosine"],
        trak=[20, PROJ_DIM],
        sweep={"damping": [0.1], "loss_weight_power": [1], "combine": [], "proj_dim": [20]}
        | {"combine": ["average_of_products", "product_of_averages"]},
        embeddings=embeddings,
    )


def of_method(path, method, dim):
    table = pd.read_hdf(path, "targets")
    rows = table[(table["method"] == method) & (table["proj_dim"] == dim)]
    return rows["correlation"].to_numpy()


def test_retrained_models_are_those_of_the_studys_own_training(run):
    masks, outputs = run.truth()
    found = pd.concat([pd.read_hdf(path, "masks") for path in run.retrained])
    assert found.index.tolist() == list(range(SUBSETS))
    assert found.columns.tolist() == run.train.ids
    assert np.array_equal(found.to_numpy(), masks)
    found = pd.concat([pd.read_hdf(path, "outputs") for path in run.retrained])
    assert found.index.tolist() == [i for i in range(SUBSETS) for _ in range(REPEATS)]
    assert found.columns.tolist() == run.pool
    values = found[run.targets].to_numpy().reshape(outputs.shape)
    assert np.abs(values - outputs).max() < 1e-3


def test_how_subsets_are_grouped_changes_no_byte(run, tmp_path):
    whole = pd.read_hdf(run.retrain(3, 6, tmp_path), "outputs")
    parts = pd.concat([pd.read_hdf(path, "outputs") for path in run.retrained])
    assert whole.equals(parts.loc[3:6])


def test_lds_of_the_scores_is_scipys(run, evaluated):
    expected = run.lds(read_scores(run.scores))
    assert np.abs(of_method(evaluated, "scores", PROJ_DIM) - expected).max() < 1e-12
    summary = pd.read_hdf(evaluated, "summary")
    row = summary[summary["kind"] == "scores"].iloc[0]
    assert abs(row["lds"] - expected.mean()) < 1e-12
    assert (summary["low"] <= summary["lds"]).all()
    assert (summary["lds"] <= summary["high"]).all()


def test_the_curve_ends_with_the_scores_and_begins_with_one_checkpoint(run, evaluated, tmp_path):
    curve = pd.read_hdf(evaluated, "checkpoints").set_index("n_checkpoints")["lds"]
    assert curve.index.tolist() == [1, 2, 3]
    assert abs(curve[3] - run.lds(read_scores(run.scores)).mean()) < 1e-12
    one = Run.__new__(Run)
    one.__dict__ |= {**vars(run), "checkpoints": {"c0": run.checkpoints["c0"]}}
    assert abs(curve[1] - run.lds(read_scores(one.stages(tmp_path))).mean()) < 1e-12


def test_every_swept_setting_is_what_its_own_run_gives(run, evaluated, tmp_path):
    sweep = pd.read_hdf(evaluated, "sweep")
    assert len(sweep) == 2 * 2 * 2 * 2
    for i, row in sweep.sample(3, random_state=0).iterrows():
        scores = run.stages(
            tmp_path / str(i),
            row["damping"],
            row["combine"],
            row["loss_weight_power"],
            row["proj_dim"],
        )
        expected = run.lds(read_scores(scores))
        assert abs(row["lds"] - expected.mean()) < 1e-12
        assert abs(row["lds_chosen_by"] - expected[::2].mean()) < 1e-12
        assert abs(row["lds_reported"] - expected[1::2].mean()) < 1e-12


def test_the_best_setting_is_chosen_on_other_targets_than_it_is_reported_on(evaluated):
    sweep, best = (pd.read_hdf(evaluated, key) for key in ("sweep", "best"))
    assert best["setting"].tolist() == ["best", "config"]
    assert best["lds_chosen_by"][0] == sweep["lds_chosen_by"].max()
    own = best.iloc[1]
    assert [own[key] for key in ("damping", "loss_weight_power", "proj_dim")] == [2, 0.5, PROJ_DIM]
    assert (best["low"] <= best["high"]).all()


def stored(run, key, split="train"):
    for path in run.features(split):
        yield pd.read_hdf(path, key).to_numpy()


def loss_weights(run):
    scores = [run.folder / f"run/scores/mine/{c}.h5" for c in run.checkpoints]
    return [h5py.File(path)["loss_weights"][:].astype(float) for path in scores]


@pytest.mark.parametrize("dim", [20, PROJ_DIM])
def test_the_row_of_trak_is_compats_formula(run, evaluated, dim):
    total = torch.zeros(len(run.train.ids), N_TARGETS)
    computer = BasicScoreComputer(torch.float32, "cpu")
    for phi, targets in zip(stored(run, "features"), stored(run, "features", "mine"), strict=True):
        phi, targets = torch.tensor(phi[:, :dim]), torch.tensor(targets[:, :dim])
        features = computer.get_x_xtx_inv(phi, computer.get_xtx(phi))
        computer.get_scores(features, targets, accumulator=total)
    scores = total.numpy() * np.mean(loss_weights(run), axis=0)[:, None]
    assert np.abs(of_method(evaluated, "trak_0.3.2", dim) - run.lds(scores)).max() < 1e-12


def test_baselines_are_what_they_say(run, evaluated):
    dots = [
        q[:, None] * (phi.astype(float) @ targets.astype(float).T)
        for q, phi, targets in zip(
            loss_weights(run),
            stored(run, "features"),
            stored(run, "features", "mine"),
            strict=True,
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
    found = of_method(evaluated, "embedding_cosine", 0)
    assert np.abs(found - run.lds(np.mean(cosines, axis=0))).max() < 1e-12
    assert "random" in pd.read_hdf(evaluated, "summary")["method"].tolist()


def test_an_evaluation_is_written_to_the_same_bytes(run, tmp_path):
    first, second = (run.evaluate(tmp_path / name) for name in ("a.h5", "b.h5"))
    assert first.read_bytes() == second.read_bytes()
    with pd.HDFStore(first, "r") as store:
        assert "sweep" not in store


def user_file(run, path, change=lambda masks, outputs: (masks, outputs)):
    """What a user would write with pandas, its columns in another order."""
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


def test_a_users_ground_truth_gives_the_same(run, evaluated, tmp_path):
    path = user_file(run, tmp_path / "mine.h5")
    found = run.evaluate(tmp_path / "e.h5", [path], expected_retrained=None)
    expected = of_method(evaluated, "scores", PROJ_DIM)
    assert np.abs(of_method(found, "scores", PROJ_DIM) - expected).max() < 1e-12
    ceiling = [of_method(x, "noise_ceiling", 0) for x in (found, evaluated)]
    assert np.abs(ceiling[0] - ceiling[1]).max() < 1e-12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m, o: (m * 2, o), r"`masks` must hold 0 and 1 only\. Found 2"),
        (lambda m, o: (m.iloc[:, 1:], o), r"columns of `masks` must be the study's ids, each once"),
        (lambda m, o: (m, o.iloc[:, 1:]), r"columns of `outputs` must be the study's ids"),
        (lambda m, o: (m.rename(columns={m.columns[0]: 9999}), o), r"Found others, such as 9999"),
        (lambda m, o: (m, o.iloc[1:]), r"as many models of one as of any other.* 1 to 2 models"),
        (lambda m, o: (m.iloc[1:], o), r"must be named by its subset.* Found 'subset-0'"),
        (lambda m, o: (m, o * np.nan), r"frame 'outputs' must be whole and finite"),
        (lambda m, o: (m, o.assign(x="text")), r"frame 'outputs' in pandas' fixed layout, of one"),
    ],
)
@pytest.mark.filterwarnings("ignore::pandas.errors.PerformanceWarning")
def test_a_users_ground_truth_that_is_not_what_it_must_be(run, tmp_path, change, message):
    path = user_file(run, tmp_path / "mine.h5", lambda m, o: change(m.astype(int), o))
    with pytest.raises(InputError, match=message):
        run.evaluate(tmp_path / "e.h5", [path], expected_retrained=None)
    assert not (tmp_path / "e.h5").exists()


def test_models_retrained_for_another_config_are_refused(run, tmp_path):
    expected = {"study": "digest", "seeds": REPEATS, "seed": 5}
    with pytest.raises(ArtifactError, match=r"Expected \{'seed': 5\}, found \{'seed': 4\}"):
        run.evaluate(tmp_path / "e.h5", expected_retrained=expected)
    with pytest.raises(ArtifactError, match=r"'loss_weight_power': 1"):
        run.evaluate(tmp_path / "e.h5", expected={"loss_weight_power": 1})


def self_influence_oracle(features, weights):
    """mean_c(A_c[i, i]) * mean_c(Q_c^0.5), dense."""
    diagonals = []
    for phi in features:
        phi = phi.astype(float)
        matrix = phi.T @ phi + 2 * np.mean((phi**2).sum(1)) * np.eye(phi.shape[1])
        diagonals.append(np.einsum("ij,jk,ik->i", phi, np.linalg.inv(matrix), phi))
    return np.mean(diagonals, axis=0) * np.mean(np.sqrt(weights), axis=0)


def expected_train(run, **more):
    return {
        **COMMON,
        "projection": PROJECTION,
        "dtype": "float32",
        "split": "train",
        "targets_digest": None,
        "checkpoints": list(run.checkpoints),
        **more,
    }


def test_self_influence_is_the_diagonal(run, tmp_path):
    path = tmp_path / "self.h5"
    compute_self_influence(
        self_influence=path,
        features=run.features("train"),
        normal_matrices=run.matrices(),
        expected=expected_train(run),
        settings=SETTINGS,
        code="code",
        memory_mb=300,
    )
    table = pd.read_hdf(path, "train")
    expected = self_influence_oracle(stored(run, "features"), loss_weights(run))
    assert np.abs(table["self_influence"] - expected).max() < 1e-9 * expected.max()
    assert table["id"].tolist() == run.train.ids


def test_flipped_labels_are_trained_on_and_found(run, tmp_path):
    """More flipped labels, and longer training, than this little net could learn by heart."""
    flips = {"fraction": 0.1, "seed": 2}
    labels = np.array([int(label) for _, label in run.train.samples])
    features, matrices = [], []
    for seed, checkpoint in enumerate(run.checkpoints):
        path = tmp_path / f"{checkpoint}.pt"
        train_checkpoint(
            checkpoint=path,
            study=STUDY,
            arguments={"steps": 60, "seed": seed},
            threads=1,
            mislabelled=flips,
        )
        features.append(tmp_path / f"{checkpoint}-features.h5")
        matrices.append(tmp_path / f"{checkpoint}-matrix.h5")
        spec = {**COMMON, "projection": PROJECTION, "dtype": "float32", "checkpoint": checkpoint}
        compute_features(
            features=features[-1],
            checkpoint=path,
            study=STUDY,
            split="train",
            shard=1,
            n_shards=1,
            spec={**spec, "targets": None, "mislabelled": flips},
            code="code",
            device="cpu",
            batch_size=64,
            memory_mb=300,
            threads=1,
        )
        compute_normal_matrix(
            normal_matrix_file=matrices[-1],
            features=features[-1],
            expected={**spec, "split": "train", "targets_digest": None, "mislabelled": flips},
            weighting="plain",
            code="code",
            memory_mb=300,
        )

    def find(**more):
        find_mislabelled(
            mislabelled=tmp_path / "found.h5",
            features=features,
            normal_matrices=matrices,
            original=run.features("train")[0],
            expected=expected_train(run, **more),
            settings=SETTINGS,
            code="code",
            memory_mb=300,
        )

    find(mislabelled=flips)
    train = pd.read_hdf(tmp_path / "found.h5", "train")
    assert np.array_equal(train["label"], labels)
    assert np.array_equal(train["given_label"], flipped_labels(labels, **flips))
    assert np.array_equal(train["flipped"] == 1, train["label"] != train["given_label"])
    detection = pd.read_hdf(tmp_path / "found.h5", "detection").set_index("method")
    order = train.sort_values("self_influence", ascending=False)["flipped"]
    assert detection.loc["self_influence", "found"] == order.head(15).mean()
    assert detection.loc["self_influence", "auc"] > 0.7
    with pytest.raises(ArtifactError, match=r"Expected \{'mislabelled': \{'fraction': 0\.2"):
        find(mislabelled={**flips, "fraction": 0.2})


def test_removals_are_what_a_loop_of_trainings_gives(run, tmp_path):
    sizes, draws, seeds, targets = [10, 30], 2, 2, run.targets[:3]
    common = {
        "n_removed": sizes,
        "draws": draws,
        "seeds": seeds,
        "seed": 1,
        "arguments": ARGUMENTS,
        "model_output": "image_classification",
        "study_digest": "digest",
    }
    jobs = {"study": STUDY, "code": "code", "batch_size": 64, "threads": 1, **common}
    random = tmp_path / "random.h5"
    retrain_without(retrained=random, scores=None, experiment=None, targets=[], **jobs)
    groups, top = [targets[:2], targets[2:]], [tmp_path / "1.h5", tmp_path / "2.h5"]
    for group, path in zip(groups, top, strict=True):
        retrain_without(
            retrained=path,
            scores=run.scores,
            experiment={"experiment": "mine", "study": "digest"},
            targets=group,
            **jobs,
        )
    compare_removals(
        counterfactual=tmp_path / "c.h5",
        random=random,
        top=top,
        groups=groups,
        n_removed=sizes,
        draws=draws,
        seeds=seeds,
        spec=common,
        code="code",
    )
    table = pd.read_hdf(tmp_path / "c.h5", "targets")
    assert len(table) == 2 * len(sizes) * len(targets)

    target, size = targets[2], 30
    column = read_scores(run.scores)[target].to_numpy()
    gone = [i for i in np.argsort(-column) if column[i] > 0][:size]
    image, label = run.study.split("mine", [target]).batch(0, 1)

    def trained(rows, repeat):
        data = Subset(run.train.samples, rows)
        seed = training_seed(1, 0, repeat)
        model = run.study.function("train")(**ARGUMENTS, seed=seed, data=data).eval()
        with torch.no_grad():
            logits = model(image)[0]
        return margin(logits, label[0]).item(), int(logits.argmax())

    everything = list(range(len(column)))
    kept = [i for i in everything if i not in gone]
    pairs = [(trained(everything, r), trained(kept, r)) for r in range(seeds)]
    rows = (table["removed"] == "top") & (table["n_removed"] == size)
    found = table[rows & (table["target_id"] == target)].iloc[0]
    assert abs(found["change"] - np.mean([b[0] - a[0] for a, b in pairs])) < 1e-3
    assert found["flips"] == np.mean([b[1] != a[1] for a, b in pairs])
    assert abs(found["output"] - np.mean([a[0] for a, _ in pairs])) < 1e-3
    masks = pd.read_hdf(random, "masks").to_numpy()
    assert masks.sum(axis=1).tolist() == [150, 140, 140, 120, 120]
    summary = pd.read_hdf(tmp_path / "c.h5", "summary")
    assert summary["removed"].tolist() == ["top", "top", "random", "random"]
    assert abs(summary["change"][1] - table[rows]["change"].mean()) < 1e-12


def test_two_runs_compared(run, tmp_path):
    other = run.stages(tmp_path / "other", dim=20)
    path = tmp_path / "comparison.h5"
    compare_runs(comparison=path, runs={"mine": (run.scores, other)}, top=10, code="code")
    a, b = read_scores(run.scores), read_scores(other)
    table = pd.read_hdf(path, "targets").set_index("target_id")
    for target in run.targets:
        expected = spearmanr(a[target], b[target]).statistic
        assert abs(table.loc[target, "rank_correlation"] - expected) < 1e-12
        common = set(a[target].nlargest(10).index) & set(b[target].nlargest(10).index)
        assert table.loc[target, "overlap_positive"] == len(common) / 10
    compare_runs(comparison=path, runs={"mine": (other, other)}, top=10, code="code")
    means = pd.read_hdf(path, "experiments").iloc[0]
    assert abs(means["rank_correlation"] - 1) < 1e-12
    assert means["overlap_negative"] == 1
    fewer = Run.__new__(Run)
    fewer.__dict__ |= {**vars(run), "targets": run.targets[1:]}
    other = fewer.stages(tmp_path / "fewer")
    with pytest.raises(InputError, match=r"must have the same targets\. Found 4, such as"):
        compare_runs(comparison=path, runs={"mine": (run.scores, other)}, top=10, code="code")
