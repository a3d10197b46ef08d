"""Runs the jobs of the workflow: one function a rule, with the rule's name.

Most lie in a module of that name; ``system/job.py`` knows the others.

A stage reads files, refuses what does not belong together, computes by pure functions, and writes
its first path: the whole artifact or nothing. It takes keywords, the names that its rule has. These
mean the same in all of them:

    study_file    The study's Python file.
    checkpoint    File or folder with the weights.
    spec          What decides the numbers. A file that was made by another spec is refused.
    targets       Ids of the experiment's targets; None for all of its file, or training samples.
    question      The file of an experiment that brings its own targets.
    code          The stage's code digest, for the artifact's provenance.
    device        ``auto``, ``cpu`` or ``cuda``, for gradients and projection; see ``find_device``.
    batch_size    Samples in the model at once, at most.
    memory_mb     MiB for arrays; fewer samples at once if they don't fit. On CUDA its free memory
                  counts for gradients and activations.
    threads       CPU threads of torch and the projection.

The last four don't change the numbers, to float32 rounding. An ``InputError`` says which file,
study or budget is not what it must be.
"""
