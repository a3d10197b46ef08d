"""Artifacts that are damaged, are not what they say, or do not belong together are refused."""

import json
import re
import shutil
import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import h5py
import numpy as np
import patience
import pytest
from linear_study import SPEC, with_two_checkpoints
from pipeline import averaged, run_exact_stages, run_stages
from refused import refused

from trak_core import artifacts
from trak_core.artifacts import (
    CHECKPOINT_SCORES,
    FEATURE_SHARD,
    FEATURES,
    ArtifactError,
    check_made_for,
    create,
    open_artifact,
    verify,
)
from trak_core.stages.join_shards import join_shards

# Files with frames, tables, vectors and numbers: the name of their kind, and one that stages wrote.
FILES = {
    "FEATURES": "features/c0/train.h5",
    "FEATURE_SHARD": "features/c0/train-1.h5",
    "NORMAL_MATRIX": "normal_matrix/c0.h5",
    "CHECKPOINT_SCORES": "scores/mine/c0.h5",
    "SCORES": "scores/mine.h5",
    "GRAMIAN": "exact/gramian/c0/train.h5",
    "EXACT_SCORES": "exact/scores/mine/c0.h5",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("damage")
    given = with_two_checkpoints(folder)
    run_stages(folder, *given, model_output="regression", proj_dim=8, shards=2)
    run_stages(folder / "top", *given, model_output="regression", proj_dim=8, keep="top_k")
    run_exact_stages(folder / "exact", *given, model_output="regression")
    return folder


@pytest.fixture
def copy(results, tmp_path):
    def copied(name):
        path = tmp_path / Path(name).name
        path.write_bytes((results / name).read_bytes())
        return path

    return copied


def flips(path):
    """Places anywhere, and among the metadata at the beginning."""
    random = np.random.default_rng(0)
    positions = [*random.integers(0, path.stat().st_size, 100), *random.integers(0, 4096, 100)]
    return [[int(position), int(random.integers(8))] for position in positions]


@pytest.fixture(scope="module")
def outcomes(results, tmp_path_factory):
    """What a reader makes of every flip, a process of its own: damage may crash or stop one."""
    folder, request = tmp_path_factory.mktemp("flips"), []
    for kind, name in FILES.items():
        path = folder / f"{kind}.h5"
        path.write_bytes((results / name).read_bytes())
        request.append([str(path), kind, flips(path)])
    command = [sys.executable, Path(__file__).parents[1] / "support/damage_worker.py"]
    answer = patience.run(command, 200, json.dumps(request), stdout=subprocess.PIPE, text=True)
    lines = [json.loads(line) for line in answer.stdout.splitlines()]
    assert answer.returncode == 0, f"the reader crashed after {lines[-1:]}"
    return lines


@pytest.mark.gate
def test_a_flipped_bit_is_found_or_is_in_no_use(outcomes):
    """HDF5 leaves some bytes free, and nobody reads them."""
    assert [flip for flip in outcomes if flip[-1] not in {"found", "harmless"}] == []
    assert len(outcomes) == 200 * len(FILES)
    assert sum(flip[-1] == "harmless" for flip in outcomes) < len(outcomes) / 3


def test_a_file_cut_short_is_found(copy):
    random = np.random.default_rng(0)
    for name, file in FILES.items():
        path, kind = copy(file), getattr(artifacts, name)
        data = path.read_bytes()
        for size in [0, 1, 511, len(data) - 1, *random.integers(0, len(data) - 1, 16)]:
            path.write_bytes(data[:size])
            with (
                pytest.raises(ArtifactError, match=r"must be complete.* remakes it"),
                open_artifact(path, kind),
            ):
                pass


def test_the_page_makes_sure_of_all_results(results, tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs/how-to/faults.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    shutil.copytree(results, tmp_path / "results")
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    path = tmp_path / "results" / FILES["GRAMIAN"]
    path.write_bytes(path.read_bytes()[:-60] + b"x")
    with pytest.raises(ArtifactError, match=r"gramian/c0/train\.h5"):
        exec(code, {})


def features_file(path, **changes):
    columns = {"outputs": np.float32([1, 2, 3]), "sample_ids": [1, 2, 3]}
    with create(path, FEATURES, {"a": 1}, {"b": 2}) as file:
        file.matrix("features", [1, 2, 3], [0, 1])[:] = 0
        for key, values in (columns | changes).items():
            file.vector(key, values)
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"outputs": np.float32([1, 2])}, r"'outputs' must have .* 3 ids in 'sample_ids'"),
        ({"sample_ids": [1, 2, 3, 4]}, r"'features/axis1' must have .* 4 ids in 'sample_ids'"),
        ({"labels": np.zeros(3, complex)}, r"'labels' must have .* dtype complex128"),
    ],
)
def test_shapes_and_dtypes_that_do_not_fit_are_refused(tmp_path, changes, message):
    path = features_file(tmp_path / "a.h5", **changes)
    with pytest.raises(ArtifactError, match=message), open_artifact(path, FEATURES):
        pass


def test_a_file_of_another_program_that_takes_our_name(tmp_path):
    """Its hash is right, its specification is not one of ours."""
    path = features_file(tmp_path / "a.h5")
    with open_artifact(path, FEATURES) as file:
        expected = SPEC.under("c0").of_train()
        with pytest.raises(ArtifactError, match="settings of the current config"):
            check_made_for(file, expected)
        with pytest.raises(ArtifactError, match=r"needs 'loss_weights'.*rule compute_features"):
            file.vector("loss_weights")


def test_solved_targets_in_place_of_scores_are_refused(results, tmp_path):
    paths = [results / "scores/mine/c0.h5", results / "top/scores/mine/c1.h5"]
    message = r"mine/c1\.h5: .*needs 'similarities/block0_values'.*rule compute_scores remakes it"
    with pytest.raises(ArtifactError, match=message):
        averaged(tmp_path / "out.h5", paths, SPEC)
    assert not list(tmp_path.iterdir())


def test_checkpoints_of_other_labels_are_refused(results, tmp_path):
    """The study's data changed on disk between two checkpoints' jobs."""
    changed = tmp_path / "c1.h5"
    with (
        open_artifact(results / "scores/mine/c1.h5", CHECKPOINT_SCORES) as old,
        create(changed, CHECKPOINT_SCORES, old.spec, old.provenance) as new,
    ):
        key = "similarities"
        new.matrix(key, old.index(key), old.columns(key))[:] = old.matrix(key)[:]
        for name, node in old.file.items():
            if isinstance(node, h5py.Dataset):
                values = old.ids(name) if node.dtype.kind == "S" else old.vector(name)
                new.vector(name, values + 1 if name == "train_labels" else values)
    with refused("artifacts.other_file", re.compile(r"c1\.h5: .* must agree on the train labels")):
        averaged(tmp_path / "out.h5", [results / "scores/mine/c0.h5", changed], SPEC)


def test_a_whole_split_in_place_of_a_shard_is_refused(results, tmp_path):
    shards = [results / "features/c0/train.h5", results / "features/c0/train-2.h5"]
    spec = SPEC.under("c0").of_train()
    with pytest.raises(ArtifactError, match=r"train\.h5: .* must agree on the order of shards"):
        join_shards(features=tmp_path / "out.h5", shards=shards, spec=spec, code="code")


def test_a_shard_of_other_samples_or_settings_is_named_with_what_it_was_made_of(results, tmp_path):
    """Samples that were added between two jobs, or a shard that an earlier config left."""
    first, second = (results / f"features/c0/train-{i}.h5" for i in (1, 2))
    spec, other = SPEC.under("c0").of_train(), tmp_path / "other.h5"
    about = {"features": tmp_path / "out.h5", "shards": [first, other], "code": "code"}

    def remake(change):
        other.unlink(missing_ok=True)
        with open_artifact(second, FEATURE_SHARD) as old:
            file_spec = deepcopy(old.spec)
            change(file_spec)
            ids = old.ids("sample_ids")
            with create(other, FEATURE_SHARD, file_spec, old.provenance) as new:
                new.matrix("features", ids, range(8))[:] = old.matrix("features")[:]
                new.vector("sample_ids", ids)
                for key in ("labels", "outputs", "predictions", "loss_weights", "curvature"):
                    if old.has(key):
                        new.vector(key, old.vector(key))

    remake(lambda own: own["shard"]["made_of"].update(samples=31))
    found = r"other\.h5: .*samples that .*train-1\.h5 is a shard of.*found {'samples': 31}"
    with pytest.raises(ArtifactError, match=found):
        join_shards(**about, spec=spec)
    remake(lambda own: own.update(study_digest="of before"))
    found = r"other\.h5: .*the current config.*found {'study_digest': 'of before'}"
    with pytest.raises(ArtifactError, match=found):
        join_shards(**about, spec=spec)
    remake(lambda own: own.update(parameters_digest="others"))
    found = r"other\.h5: .*specification of .*train-1\.h5.*found {'parameters_digest': 'others'}"
    with pytest.raises(ArtifactError, match=found):
        join_shards(**about, spec=spec)
    remake(lambda own: None)
    join_shards(**about, spec=spec)


def test_h5py_alone_notices_a_flipped_bit_elsewhere(copy):
    """PyTables, under pandas, may crash of the error that HDF5 reports."""
    path = copy(FILES["SCORES"])
    data, name = path.read_bytes(), b"prediction"
    assert name in data
    path.write_bytes(data.replace(name, b"predictioo"))
    with pytest.raises((OSError, RuntimeError, KeyError)), h5py.File(path) as file:
        dict(file["train/table"].attrs)
    with pytest.raises(ArtifactError, match=r"mine\.h5: the file must be"):
        verify(path)
