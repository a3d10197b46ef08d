"""Stages: the functions that run the jobs of the workflow.

Each rule of the workflow has a stage of the same name. ``stage_module`` in ``runtime/job.py``
returns the stage's module. A stage reads files, checks that they belong together, computes a
result, and writes it atomically to the path in its first argument. These arguments have the same
meaning in all stages:

    study_file    The study's Python file.
    checkpoint    The file or folder that contains the model's weights.
    spec          The settings that determine the result. Input files must have the same settings.
    targets       The ids of the experiment's targets. None means all samples in the data.
    question      The file that contains the experiment's targets, or None for target_data().
    selected      At most one file from ``select_targets``, whose ids are used as ``targets``.
    code          The digest of the stage's code, which is stored in the resulting file.
    device        The device for gradients and the projection: ``auto``, ``cpu`` or ``cuda``.
    batch_size    The largest number of samples in a batch.
    memory_mb     The memory for arrays in MiB, except for gradients and activations on a GPU.
    threads       The number of CPU threads for torch and for the projection.

The last four arguments change results only by float32 rounding. If an ``InputError`` is raised, its
message says which file, study or memory limit the user must change.
"""
