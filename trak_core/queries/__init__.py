"""Open a finished run as a fitted ``Attributor``, and score further samples with it."""
