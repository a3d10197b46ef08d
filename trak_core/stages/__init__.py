"""Run the jobs of the workflow: one function for each rule, with the rule's name.

``stage_module`` in ``runtime/job.py`` returns the module of each.

A stage reads files, checks that they belong together, calls functions that compute, and writes its
first path, the whole file or nothing. Its keyword arguments are what its rule names. These have the
same meaning in all stages:

    study_file    The study's Python file.
    checkpoint    File or folder with the weights.
    spec          The settings that determine the numbers. Files made for others are refused.
    targets       Ids of the experiment's targets. None means all samples of its file.
    question      A file with the experiment's targets, if they are not the study's.
    selected      At most one file of targets from ``select_targets``. It replaces ``targets``.
    code          The digest of the stage's code, stored in the file's provenance.
    device        ``auto``, ``cpu`` or ``cuda``, for gradients and the projection.
    batch_size    The largest number of samples in the model at once.
    memory_mb     MiB for arrays. On CUDA, gradients and activations use the free GPU memory.
    threads       CPU threads of torch and of the projection.

The last four do not change the numbers, except for float32 rounding. An ``InputError`` names the
file, the study or the budget that must be changed.
"""
