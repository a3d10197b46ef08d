"""Define studies for common kinds of models, which a config can name instead of a Python file."""
