"""Every fault of docs/how-to/faults.md is caused by a test, except Snakemake's own messages."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs/how-to/faults.md").read_text()
BEFORE, SNAKEMAKES = PAGE.split("## What Snakemake itself says")
OWN = BEFORE + SNAKEMAKES.split("## Broken files")[1]
ROWS = [line for line in OWN.splitlines() if line.startswith("| ") and "| fault |" not in line]
# How a row begins, and the tests that cause its fault.
TESTED = {
    "a job is killed": "test_six_kills_of_a_job_cost_no_finished_file "
    "test_a_study_gives_the_files_of_a_local_run",
    "Snakemake and its jobs are killed": "test_a_killed_run_goes_on_after_unlock",
    "a job or Snakemake is told to stop": (
        "test_shards_that_are_done_stay_when_snakemake_or_a_job_is_told_to_stop"
    ),
    "a sample, a file or a study's function hangs": (
        "test_a_study_that_leaves_a_thread_and_a_process"
    ),
    "the study leaves a thread": "test_a_study_that_leaves_a_thread_and_a_process "
    "test_where_a_fork_could_differ_a_script_has_its_own_python",
    "two Snakemake runs": "test_two_runs_with_one_results_folder test_a_results_folder_is_one_runs",
    "the file system has no locks": "test_a_disk_that_knows_no_locks "
    "test_a_run_on_a_disk_that_knows_no_locks",
    "the results folder is read-only": " test_a_colleague_s_results_are_asked_as_they_are",
    "memory runs out": "test_every_library_s_lack_of_memory_is_explained "
    "test_a_job_out_of_memory_says_what_to_change test_what_has_ended_a_script_is_told",
    "a result file is damaged": "test_a_flipped_bit_is_found_or_is_in_no_use "
    "test_damage_is_refused_where_it_is_read test_a_damaged_file_stops_the_job_and_names_itself "
    "test_a_file_cut_short_is_found test_bad_files_are_refused_by_name_with_the_way_out "
    "test_an_artifact_has_its_values_in_itself "
    "test_features_and_gramians_of_another_config_are_refused "
    "test_files_of_other_settings_are_refused_though_snakemake_knows_nothing "
    "test_a_file_of_another_program_that_takes_our_name",
    "you read a damaged file": "test_pandas_alone_notices_a_flipped_bit_in_data "
    "test_h5py_alone_notices_a_flipped_bit_elsewhere "
    "test_zeros_in_place_of_values_are_found_by_the_content_hash",
    "a checkpoint is damaged": "test_bad_checkpoint "
    "test_all_bad_checkpoints_are_told_of_before_any_job "
    "test_weights_of_other_numbers_are_refused_alike_by_start_and_job",
    "the base model of a LoRA adapter changes": (
        "test_features_on_another_base_are_never_taken_together"
    ),
    "a bit of a `torch.save` checkpoint flips": "test_bad_checkpoint "
    "test_a_flipped_bit_of_a_checkpoint_is_found_or_harmless",
}
# Of sentences outside the tables.
IN_TEXT = "test_a_pickle_in_a_table_is_not_opened test_nothing_runs_what_a_file_brings"


def test_every_fault_has_a_test():
    assert len(ROWS) == len(TESTED)
    for row, start in zip(ROWS, TESTED, strict=True):
        assert row.startswith(f"| {start}")


def test_every_test_that_is_named_exists():
    texts = [path.read_text() for path in TESTS.rglob("test_*.py")]
    defined = {name for text in texts for name in re.findall(r"^def (test_\w+)", text, flags=re.M)}
    assert {name for names in (*TESTED.values(), IN_TEXT) for name in names.split()} <= defined
