"""What a config may ask, what it costs, and what decides the numbers of each job; no torch."""
