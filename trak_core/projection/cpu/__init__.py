"""Project gradients on a CPU. A compiled function projects one slice of coordinates at a time."""
