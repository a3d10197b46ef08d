import pytest

from trak_core.config.schema import checkpoint_table, target_ids
from trak_core.errors import InputError


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


def test_hundreds_of_checkpoints_fit_an_attribute():
    table = {f"checkpoint-{i}": f"{i}.pt" for i in range(500)}
    assert len(checkpoint_table(table, trained=False)) == 500
    with pytest.raises(InputError, match=r"Found 600"):
        checkpoint_table({f"checkpoint-{i}": "x" for i in range(600)}, trained=False)
