"""Run the job of a rule: call its stage, write files atomically, and log progress."""
