"""Read and check configs, estimate the memory of jobs, and derive their settings, without torch."""
