"""Run a rule's job: call its stage, write files atomically, configure the heap, log progress."""
