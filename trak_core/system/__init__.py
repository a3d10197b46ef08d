"""The machine: whole files, memory, logs, progress, one GPU for one process."""
