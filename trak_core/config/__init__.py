"""Read and check configs, estimate memory, and derive the settings of jobs, without torch."""
