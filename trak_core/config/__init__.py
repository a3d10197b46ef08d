"""Read and check a config, and derive the settings and the memory of jobs, without torch."""
