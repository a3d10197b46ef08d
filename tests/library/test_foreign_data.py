"""HDF5 files whose values lie elsewhere, or nowhere, are refused in one message."""

import re

import h5py
import numpy as np
import pandas as pd
import pytest

from trak_core.artifacts import FEATURES, ArtifactError, create, open_artifact, read_frame, verify

VALUES = "features/block0_values"
SECRET = b"\0\0\x80\x3f" * 6  # ones, as another file's bytes


def features(path):
    with create(path, FEATURES, {"a": [1]}, {"b": 2}) as file:
        file.matrix("features", [1, 2, 3], [0, 1])[:] = 0.5
        file.vector("outputs", np.ones(3, np.float32))
        file.vector("sample_ids", [1, 2, 3])
    return path


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
    as_virtual_dataset: "'{}' has its values in another file",
    as_external_storage: "'{}' has its values in another file",
    as_nothing: r"'{}' has the shape \(1048576, 1048576\) and .*, but only 0 bytes are stored",
    as_little: r"'{}' has the shape \(4096, 2\) and dtype float32, but only 24 bytes are stored",
}


@pytest.mark.parametrize("place", PLACES)
def test_an_artifact_has_its_values_in_itself(place, tmp_path):
    path, other = features(tmp_path / "a.h5"), features(tmp_path / "b.h5")
    with h5py.File(path, "r+") as file:
        attributes = dict(file[VALUES].attrs)
        del file[VALUES]
        place(file, VALUES, other)
        if VALUES in file:
            file[VALUES].attrs.update(attributes)
    message = rf"a\.h5: a trak-.* must be complete.* {PLACES[place].format(VALUES)}\. .*remakes it"
    with pytest.raises(ArtifactError, match=message), open_artifact(path, FEATURES):
        pass
    with pytest.raises(ArtifactError, match=PLACES[place].format(VALUES)):
        verify(path)


@pytest.fixture
def frame(tmp_path):
    path = tmp_path / "truth.h5"
    pd.DataFrame(np.ones((3, 2), np.float32), ["a", "bb", "é"], [7, 8]).to_hdf(path, key="masks")
    return path


@pytest.mark.parametrize("place", PLACES)
def test_a_ground_truth_has_its_values_in_itself(place, frame, tmp_path):
    name, other = "masks/block0_values", tmp_path / "other.h5"
    other.write_bytes(frame.read_bytes())
    with h5py.File(frame, "r+") as file:
        del file[name]
        place(file, name, other)
    with pytest.raises(ArtifactError, match=r"truth\.h5: the file must be readable HDF5") as error:
        read_frame(frame, "masks")
    assert "link" in str(error.value) or re.search(PLACES[place].format(name), str(error.value))


def test_int8_frames_without_their_scales_are_refused(tmp_path):
    for case in ("none", "fewer", "float64"):
        with create(tmp_path / "a.h5", FEATURES, {}, {}) as file:
            file.matrix("features", [1, 2, 3], [0, 1], dtype=np.int8)[:] = 1
            file.vector("outputs", np.ones(3, np.float32))
            file.vector("sample_ids", np.arange(3))
        with h5py.File(tmp_path / "a.h5", "r+") as file:
            del file["features_scales"]
            if case != "none":
                dtype = np.float64 if case == "float64" else np.float32
                file["features_scales"] = np.ones(3 - (case == "fewer"), dtype)
        with pytest.raises(ArtifactError, match="features_scales"):
            verify(tmp_path / "a.h5")
