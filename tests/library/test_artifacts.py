import contextlib
import json
import tarfile
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import pytest
from refused import refused

from trak_core.artifacts import (
    EVALUATION,
    FEATURES,
    SCORES,
    SELF_INFLUENCE,
    ArtifactError,
    check_same,
    create,
    open_artifact,
    read,
    read_frame,
    scaled_integers,
    verify,
)
from trak_core.artifacts.format import content_hash

IDS = {"integers": [3, 1, 2], "strings": ["a", "bb", "ccé"]}


def write(path, ids=(3, 1, 2), values=None, kind=SCORES, spec=None):
    ids = list(ids)
    with create(path, kind, spec or {"b": 1, "a": [1, 2]}, {"numpy": "x"}, unit="log-odds") as file:
        rows = file.matrix("scores", ids, ["t1", "t2"])
        rows[:] = np.arange(6).reshape(3, 2) if values is None else values
        file.vector("loss_weights", np.float32([1, 2, 3]))
        file.vector("sample_ids", ids)
        file.scalar("mean_squared_norm", 2.5)
        for key in ("top_influences", "targets", "train"):
            file.table(key, pd.DataFrame({"id": ids, "label": [1, 2, 3]}), ["id"])
    return path


def features(path, rows, dtype=np.float32):
    """Write features by blocks that are no chunks."""
    with create(path, FEATURES, {"a": [1]}, {"b": 2}) as file:
        values = file.matrix("features", range(len(rows)), range(rows.shape[1]), dtype=dtype)
        for start in range(0, len(rows), 700):
            values[start : start + 700] = rows[start : start + 700]
        file.vector("outputs", np.ones(len(rows), np.float32))
        file.vector("sample_ids", np.arange(len(rows)))
    return path


@pytest.mark.parametrize("ids", IDS.values(), ids=IDS)
def test_what_is_written_is_read(tmp_path, ids):
    path = write(tmp_path / "deep/er/a.h5", ids)
    with open_artifact(path, SCORES) as file:
        assert file.spec == {"a": [1, 2], "b": 1}
        assert file.index("scores") == ids
        assert file.columns("scores") == ["t1", "t2"]
        np.testing.assert_array_equal(file.matrix("scores")[:], [[0, 1], [2, 3], [4, 5]])
        assert file.ids("sample_ids") == ids
        assert file.vector("loss_weights").tolist() == [1, 2, 3]
        assert file.scalar("mean_squared_norm") == 2.5
    assert [p.name for p in path.parent.iterdir()] == ["a.h5"]
    # By pandas alone.
    frame = pd.read_hdf(path, "scores")
    assert frame.index.tolist() == ids
    assert frame.columns.tolist() == ["t1", "t2"]
    assert frame.dtypes.unique().tolist() == [np.float32]
    assert pd.read_hdf(path, "scores", start=1, stop=3).index.tolist() == ids[1:]
    assert pd.read_hdf(path, "targets")["id"].tolist() == ids
    query = f"id == {ids[1]!r}"
    assert pd.read_hdf(path, "targets", where=query)["label"].tolist() == [2]


@pytest.mark.parametrize("labels", [[2, 0, 1], [7, 8, 9], ["a", "b", "c"]], ids=str)
def test_rows_of_a_frame_are_written_in_their_order_whatever_their_labels(tmp_path, labels):
    frame = pd.DataFrame({"id": ["x", "y", "z"], "label": [3, 1, 2]}, index=labels)
    with create(tmp_path / "a.h5", EVALUATION, {"made": "here"}, {}) as file:
        file.table("summary", frame, ["id"])
        file.table("targets", frame, [])
    for key in ("summary", "targets"):
        read = pd.read_hdf(tmp_path / "a.h5", key)
        assert read["id"].tolist() == ["x", "y", "z"]
        assert read["label"].tolist() == [3, 1, 2]


@pytest.mark.parametrize(("n", "m"), [(1, 1), (1025, 65), (3000, 64), (1023, 63), (2049, 129)])
def test_chunks_take_no_more_room_than_the_numbers(tmp_path, n, m):
    with create(tmp_path / "a.h5", FEATURES, {}, {}) as file:
        file.matrix("features", range(n), range(m), chunks=(1024, 64))[:] = 1
        values = file.file["features/block0_values"]
        file.file.flush()
        assert all(chunk <= most for chunk, most in zip(values.chunks, (1024, 64), strict=True))
        stored, most = values.id.get_storage_size(), 1.05 * values.nbytes
        assert stored <= most + 8 * np.prod(np.ceil(np.divide((n, m), values.chunks)))


def test_int8_frames_are_read_by_their_scales(tmp_path):
    rows = np.random.default_rng(0).standard_normal((3000, 65)).astype(np.float32)
    verify(features(tmp_path / "a.h5", rows, np.int8))
    whole, scales = scaled_integers(rows)
    frame = pd.read_hdf(tmp_path / "a.h5", "features")
    with h5py.File(tmp_path / "a.h5") as file:
        by_hand = frame.mul(file["features_scales"][:], axis=0).to_numpy()
    with open_artifact(tmp_path / "a.h5", FEATURES) as file:
        read = file.matrix("features")
        assert np.array_equal(read[:], whole * scales[:, None])
        assert np.array_equal(read[:], by_hand)
        parts = slice(2000, 2100), slice(0, 3000, 7), slice(2990, 4000), slice(5, 3), 5
        for part in (*parts, (slice(1000, 2100), slice(7)), (slice(0, 9), 3), (3, 3)):
            assert np.array_equal(read[part], by_hand[part])
    for bad in (np.nan, np.inf, -np.inf, np.finfo(np.float32).max):
        rows[2, 7] = bad
        with pytest.raises(ArtifactError, match=r"finite, but 'features/.*values' contains NaN"):
            features(tmp_path / "b.h5", rows, np.int8)
    assert not (tmp_path / "b.h5").exists()


def test_a_table_without_rows_is_refused(tmp_path):
    with (
        refused("artifacts.no_row", "top_influences"),
        create(tmp_path / "a.h5", SCORES, {}, {}) as f,
    ):
        f.table("top_influences", {"score": np.zeros(0)}, [])
    assert not (tmp_path / "a.h5").exists()


LISTS = {
    "checkpoints": [{"id": f"checkpoint-{i}", "sha256": f"{i:064x}"} for i in range(5000)],
    "targets": [*range(4000), "a", "bb", "ccé"],
    "empty": [],
    "mixed": [None, True, 1.5, "", [2, [3]], {"a": {"b": []}}],
}


def test_lists_of_any_length_are_read_as_they_were_written(tmp_path):
    spec = {**LISTS, "seed": 0, "targets_of": None, "sweep": {"damping": [1, 2]}}
    provenance = {"numpy": "x", "made_from": [{"made_from": [{"host": i}]} for i in range(5000)]}
    for name in ("a.h5", "b.h5"):
        with create(tmp_path / name, SELF_INFLUENCE, spec, provenance) as file:
            file.table("train", pd.DataFrame({"id": [1]}), ["id"])
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()
    with open_artifact(tmp_path / "a.h5", SELF_INFLUENCE) as file:
        assert file.spec == spec
        assert file.provenance == provenance
    # What docs and module say of h5py alone.
    with h5py.File(tmp_path / "a.h5") as file:
        found = json.loads(file.attrs["spec"])
        assert not set(found) & set(LISTS)
        for key, rows in file["spec"].items():
            found[key] = [json.loads(row) for row in rows[:]]
            assert rows.fletcher32 == bool(len(rows))
        assert found == spec


def test_the_content_hash_covers_values_attributes_and_lists(tmp_path):
    hashes = []
    with h5py.File(write(tmp_path / "a.h5"), "r+") as file:
        hashes.append(content_hash(file))
        assert hashes[0].encode() == file.attrs["content-hash"]
        file["scores/block0_values"][0, 0] = 9
        hashes.append(content_hash(file))
        file.attrs["unit"] = "furlongs"
        hashes.append(content_hash(file))
        file["spec/a"][0] = b"9"
        hashes.append(content_hash(file))
        file["spec/c"] = file["spec/a"][:]
        hashes.append(content_hash(file))
        del file["train"]
        hashes.append(content_hash(file))
    assert len(set(hashes)) == 6


def moved():
    """Bytes that this process has asked the system to read, and to write."""
    words = Path("/proc/self/io").read_text().split()
    return np.array([int(words[1]), int(words[3])])


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Features of 16 MiB, and the bytes that moved for it."""
    values, before = np.arange(2**22, dtype=np.float32).reshape(8192, 512), moved()
    path = features(tmp_path_factory.mktemp("large") / "a.h5", values)
    return path, values, (moved() - before) / values.nbytes


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="runs on Linux")
def test_bytes_are_written_once_read_once_and_where_needed(large):
    path, values, (read_back, written) = large
    assert written < 1.05
    assert read_back < 0.1
    before = moved()
    with open_artifact(path, FEATURES) as file:
        assert (file.vector("outputs", 512, 1024) == 1).all()
    opened = moved()
    with open_artifact(path, FEATURES) as file:
        rows = file.matrix("features")
        for start in range(0, 8192, 512):
            assert np.array_equal(rows[start : start + 512], values[start : start + 512])
    assert (opened - before)[0] < 0.05 * values.nbytes
    assert 1 < (moved() - opened)[0] / values.nbytes < 1.05


@pytest.fixture
def chunked(large):
    """The bytes of the large file, and where one chunk of its features is."""
    with h5py.File(large[0]) as file:
        chunk = file["features/block0_values"].id.get_chunk_info(20)
    return bytearray(large[0].read_bytes()), chunk


def test_damage_is_refused_where_it_is_read(large, chunked, tmp_path):
    data, chunk = chunked
    data[chunk.byte_offset + chunk.size // 2] ^= 1
    path = tmp_path / "a.h5"
    path.write_bytes(data)
    message = r"a\.h5: .* must be complete and unchanged\. .*rule compute_features remakes it"
    with open_artifact(path, FEATURES) as file:
        assert (file.vector("outputs") == 1).all()
        rows = file.matrix("features")
        assert np.array_equal(rows[:2048], large[1][:2048])
        for _ in range(2):
            with pytest.raises(ArtifactError, match=message):
                rows[:]
    with pytest.raises(ArtifactError, match="must be complete and unchanged"):
        verify(path)


def test_zeros_in_place_of_values_are_found_by_the_content_hash(chunked, tmp_path):
    """Fletcher's checksum of zeros is zero, as of a part of the disk that was never written."""
    data, chunk = chunked
    data[chunk.byte_offset : chunk.byte_offset + chunk.size] = bytes(chunk.size)
    (tmp_path / "a.h5").write_bytes(data)
    with pytest.raises(ArtifactError, match="the hash of its content differs"):
        verify(tmp_path / "a.h5")


def test_more_files_are_read_at_once_than_are_open(tmp_path):
    n = read._MOST_OPEN + 10
    data = write(tmp_path / "0.h5").read_bytes()
    paths = [tmp_path / f"{i}.h5" for i in range(n)]
    for path in paths[1:]:
        path.write_bytes(data)
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open_artifact(path, SCORES)) for path in paths]
        rows = [file.matrix("scores") for file in files]
        for start in range(3):
            for file, values in zip(files, rows, strict=True):
                assert values[start].tolist() == [2 * start, 2 * start + 1]
                assert file.vector("loss_weights", start, start + 1) == start + 1
                assert len(read.Artifact._open) <= read._MOST_OPEN
        np.testing.assert_array_equal(rows[-1], [[0, 1], [2, 3], [4, 5]])
        # Nothing of the first file is open any more: another one in its place is noticed.
        other = write(tmp_path / "other.h5", values=np.ones((3, 2)))
        other.replace(paths[0])
        with pytest.raises(ArtifactError, match=r"0\.h5: .* must not change .* replaced"):
            rows[0][0]
    assert not read.Artifact._open


def test_an_exception_leaves_what_was_there(tmp_path):
    path = write(tmp_path / "a.h5")
    before = path.read_bytes()
    with contextlib.suppress(KeyboardInterrupt), create(path, SCORES, {}, {}) as file:
        file.matrix("scores", [1], [2])
        raise KeyboardInterrupt
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.h5"]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_never_written(tmp_path, bad):
    values = np.zeros((3, 2))
    values[1, 1] = bad
    with pytest.raises(ArtifactError, match=r"'scores/block0_values' contains NaN or infinity"):
        write(tmp_path / "a.h5", values=values)
    assert not list(tmp_path.iterdir())


def test_a_matrix_that_was_not_filled_is_never_written(tmp_path):
    with (
        pytest.raises(ValueError, match="only 299 of 300 rows"),
        create(tmp_path / "a.h5", SCORES, {}, {}) as file,
    ):
        file.matrix("scores", range(300), range(2))[:299] = 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (None, "There is no file"),
        (b"", "must be complete"),
        (b"not HDF5" * 99, "must be complete"),
        ({}, "Missing: train"),
        ({"encoding-version": 1}, "version 2. Found trak-scores, version 1"),
        ({"encoding-type": "trak-features"}, "trak-scores, version 2. Found trak-features"),
    ],
)
def test_bad_files_are_refused_by_name_with_the_way_out(tmp_path, changed, message):
    path = write(tmp_path / "a.h5")
    if isinstance(changed, dict):
        with h5py.File(path, "r+") as file:
            file.attrs.update(changed)
            del file["train"]
    else:
        path.unlink()
        if changed is not None:
            path.write_bytes(changed)
    with pytest.raises(ArtifactError) as error, open_artifact(path, SCORES):
        pass
    assert str(error.value).startswith(f"{path}: ")
    assert message in str(error.value)
    assert "rule average_scores remakes it" in str(error.value)


def test_check_same_names_what_differs(tmp_path):
    differing = r"the settings\. Expected \{'b': 2\}, found \{'b': 3\}.* rule average_scores"
    with open_artifact(write(tmp_path / "a.h5"), SCORES) as file:
        check_same("seed", {"a": 1}, {"a": 1}, file)
        with pytest.raises(ArtifactError, match=differing):
            check_same("settings", {"a": 1, "b": 2}, {"a": 1, "b": 3}, file)


KEPT = Path(__file__).parents[1] / "data/artifacts"


def test_files_of_every_release_are_read_forever(tmp_path):
    for archive in (KEPT / "0.3.0.tar.xz", *KEPT.glob("*.tar.xz")):
        with tarfile.open(archive) as kept:
            kept.extractall(tmp_path / archive.stem, filter="data")
    for path in tmp_path.glob("*/*"):
        kind = verify(path)
        assert kind.rule == path.stem
        with h5py.File(path) as file:
            frames = [key for key in kind.keys if "pandas_type" in file[key].attrs]
            sizes = [file[key].size for key in kind.keys if key not in frames]
        assert all([*sizes, *(len(pd.read_hdf(path, key)) for key in frames)])


@pytest.mark.parametrize("key", ["train", "detection"])
def test_tables_of_pandas_3_are_read_by_pandas_2(key, tmp_path):
    rows = {"train_id": ["a", "b", "ü"], "flipped": [True, False, True], "score": [0.5, -1.0, 2.0]}
    expected = pd.DataFrame({**rows, "rank": [2, 3, 1]})
    kept, new = KEPT.parent / "tables_of_pandas_3.h5", tmp_path / "new.h5"
    with create(new, SELF_INFLUENCE, {}, {}) as file:
        for name in ("train", "detection"):
            file.table(name, expected, ["train_id", "rank"])
    for path in (kept, new):
        found = pd.read_hdf(path, key)
        pd.testing.assert_frame_equal(found, expected, check_dtype=False)
        assert pd.read_hdf(path, key, where="rank < 3 & train_id == 'ü'").score.tolist() == [2]
        with h5py.File(path) as file:
            assert file[key].attrs["pandas_version"] == b"0.15.2"


# HDF5 files whose values lie elsewhere, or nowhere.
VALUES = "features/block0_values"
SECRET = b"\0\0\x80\x3f" * 6  # ones, as another file's bytes


def as_external_link(file, name, other):
    file[name] = h5py.ExternalLink(str(other), name)


def as_soft_link(file, name, _other):
    group = name.split("/")[0]
    file["elsewhere"] = np.ones((3, 2), np.float32)
    assert group in file
    file[name] = h5py.SoftLink("/elsewhere")


def as_virtual_dataset(file, name, other):
    layout = h5py.VirtualLayout((3, 2), np.float32)
    layout[:] = h5py.VirtualSource(str(other), name, (3, 2))
    file.create_virtual_dataset(name, layout)


def as_external_storage(file, name, other):
    secret = other.with_suffix(".raw")
    secret.write_bytes(SECRET)
    file.create_dataset(name, (3, 2), np.float32, external=[(str(secret), 0, len(SECRET))])


def as_nothing(file, name, _other):
    file.create_dataset(name, (2**20, 2**20), np.float32, chunks=(1024, 1024))


def as_little(file, name, _other):
    file.create_dataset(name, (2**12, 2), np.float32, chunks=(3, 2))[:3] = 1


PLACES = {
    as_external_link: "'{}' is a link to another object",
    as_soft_link: "'{}' is a link to another object",
    as_virtual_dataset: "'{}' stores its values in another file",
    as_external_storage: "'{}' stores its values in another file",
    as_nothing: r"'{}' has shape \(1048576, 1048576\) and .*, but .* only 0 bytes of its values",
    as_little: r"'{}' has shape \(4096, 2\) and dtype float32, but .* only 24 bytes of its values",
}


@pytest.mark.parametrize("place", PLACES)
def test_artifacts_and_ground_truths_have_their_values_in_themselves(place, tmp_path):
    path, other = (features(tmp_path / name, np.ones((3, 2)) / 2) for name in ("a.h5", "b.h5"))
    truth = tmp_path / "truth.h5"
    pd.DataFrame(np.ones((3, 2), np.float32), ["a", "bb", "é"], [7, 8]).to_hdf(
        truth, key="features"
    )
    for spoilt in (path, truth):
        with h5py.File(spoilt, "r+") as file:
            attributes = dict(file[VALUES].attrs)
            del file[VALUES]
            place(file, VALUES, other)
            if VALUES in file:
                file[VALUES].attrs.update(attributes)
    said = PLACES[place].format(VALUES)
    message = rf"a\.h5: a trak-.* must be complete.* {said}\. .*remakes it"
    with pytest.raises(ArtifactError, match=message), open_artifact(path, FEATURES):
        pass
    with pytest.raises(ArtifactError, match=said):
        verify(path)
    with pytest.raises(ArtifactError, match=rf"truth\.h5: the file must be.*({said}|link)"):
        read_frame(truth, "features")


def test_int8_frames_without_their_scales_are_refused(tmp_path):
    for case in ("none", "fewer", "float64"):
        path = features(tmp_path / "a.h5", np.ones((3, 2)), np.int8)
        with h5py.File(path, "r+") as file:
            del file["features_scales"]
            if case != "none":
                dtype = np.float64 if case == "float64" else np.float32
                file["features_scales"] = np.ones(3 - (case == "fewer"), dtype)
        with pytest.raises(ArtifactError, match="features_scales"):
            verify(path)
