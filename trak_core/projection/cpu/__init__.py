"""Projection on a CPU. Each kind has a kernel, which is applied to fixed slices of coordinates."""
