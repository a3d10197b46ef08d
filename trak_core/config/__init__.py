"""Read and check configs, estimate memory, and derive the settings of each job, without torch."""
