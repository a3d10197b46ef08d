"""Stages: the functions that run the jobs of the workflow.

Each rule has a stage of the same name. ``stage_module`` in ``runtime/job.py`` returns the stage's
module. A stage reads files, checks that they belong together, computes a result, and writes it
atomically to the path in its first argument. These arguments have the same meaning in all stages:

    study_file    The study's Python file.
    checkpoint    The file or folder with the weights.
    spec          The settings that determine the result. Input files must have the same settings.
    targets       Ids of the experiment's targets; None for all samples in the data.
    question      A file with the experiment's targets; None if target_data() contains them.
    selected      At most one file from ``select_targets``, whose ids are used as ``targets``.
    code          The digest of the stage's code, stored in the file's provenance.
    device        ``auto``, ``cpu`` or ``cuda``, for gradients and the projection.
    batch_size    The largest number of samples in a batch.
    memory_mb     MiB for arrays. On CUDA, gradients and activations use the free GPU memory.
    threads       The number of CPU threads for torch and for the projection.

The last four arguments change results only by float32 rounding. If an ``InputError`` is raised, its
message says which file, study or memory limit must be changed.
"""
