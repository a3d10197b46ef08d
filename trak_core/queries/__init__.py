"""Open a finished run as a fitted ``Attributor``, and score new samples with it."""
