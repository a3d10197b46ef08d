import pytest

from trak_core.config.read_config import target_ids


@pytest.mark.parametrize(
    ("written", "ids"),
    [
        (["12", "-3", "0"], [12, -3, 0]),
        (["0007", "12"], ["0007", "12"]),
        (["12", "twelve"], ["12", "twelve"]),
        (["-0"], ["-0"]),
        (["+1"], ["+1"]),
    ],
)
def test_ids_of_a_table_are_integers_if_all_are_written_as_one_is(tmp_path, written, ids):
    table = tmp_path / "targets.tsv"
    table.write_text("id\n" + "\n".join(written) + "\n")
    assert target_ids(str(table)) == ids
