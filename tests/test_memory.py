import pytest

from trak_core.errors import InputError
from trak_core.memory import Need, average_need, check_memory, normal_matrix_need, scores_need


def test_rows_get_half_of_what_the_fixed_part_leaves():
    assert Need("it", 0, 10**4).rows(100) == 100 * 2**20 // 2 // 10**4 // 1024 * 1024
    assert Need("it", 60 * 2**20, 10**5).rows(100) == 40 * 2**20 // 2 // 10**5


@pytest.mark.parametrize("memory_mb", [64, 333, 1000])
def test_what_is_taken_never_exceeds_the_budget(memory_mb):
    for proj_dim in (16, 1024, 1500):
        for need in (normal_matrix_need(proj_dim), scores_need(proj_dim, 20)):
            try:
                taken = need.fixed_bytes + need.rows(memory_mb) * need.row_bytes
            except InputError:
                assert need.fixed_bytes > (memory_mb - 10) * 2**20
            else:
                assert taken <= memory_mb * 2**20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"proj_dim": 8192}, r"^compute\.memory_mb must hold the normal matrix of proj_dim 8192: "),
        (
            {"n_targets": {"small": 3, "large": 10**5}},
            r"^experiment large: compute\.memory_mb must hold the solve for proj_dim 512 and "
            r"100000 targets: 1\d\d\d MiB\. Found 500\. Raise it",
        ),
        ({"top": 10**4, "n_targets": {"mine": 400}}, r"^experiment mine: .* scoring\.top 10000"),
        ({"n_train": 10**7}, r"^experiment mine: .* the average for 10000000 training samples"),
    ],
)
def test_a_budget_is_checked_for_every_job(change, message):
    config = {
        "proj_dim": 512,
        "n_train": 50_000,
        "n_targets": {"mine": 100},
        "n_checkpoints": 10,
        "scores": "full",
        "top": 20,
    }
    if message is None:
        check_memory(500, **config)
    else:
        with pytest.raises(InputError, match=message):
            check_memory(500, **{**config, **change})


def test_the_average_counts_solved_targets_once_and_only_with_top_k():
    sizes = {"n_train": 10, "n_targets": 1000, "top": 1}
    needs = [
        average_need(**sizes, n_checkpoints=n, solved_dim=k)
        for n, k in ((1, None), (100, None), (1, 4096), (100, 4096))
    ]
    assert needs[0].fixed_bytes == needs[1].fixed_bytes
    assert needs[2].fixed_bytes == needs[3].fixed_bytes == needs[0].fixed_bytes + 8 * 4096 * 1000
