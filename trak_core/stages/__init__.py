"""Jobs of the workflow: one module a rule, with the rule's name; paths and plain values in."""
