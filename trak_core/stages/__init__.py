"""Run the jobs of the workflow, with one function for each rule that has the rule's name.

``stage_module`` in ``runtime/job.py`` returns the module of each function.

A stage reads files, checks that they belong together, calls functions that compute, and atomically
writes its first path. Its keyword arguments are defined by its rule. These have the same meaning in
all stages:

    study_file    The study's Python file.
    checkpoint    The file or folder with the weights.
    spec          The settings that determine the result. Files made for others raise an error.
    targets       Ids of the experiment's targets; None for all samples of its file.
    question      A file with the experiment's targets, if they are not the study's.
    selected      At most one file of targets from ``select_targets``. It replaces ``targets``.
    code          The digest of the stage's code, stored in the file's provenance.
    device        ``auto``, ``cpu`` or ``cuda``, for gradients and the projection.
    batch_size    The largest number of samples in a batch.
    memory_mb     MiB for arrays. On CUDA, gradients and activations use the free GPU memory.
    threads       The number of CPU threads of torch and of the projection.

The last four do not change results, except for float32 rounding. An ``InputError`` names the file,
the study or the memory limit that must be changed.
"""
