"""Run jobs on this machine: whole files, memory, logs, progress, stages by their rules, forks."""
