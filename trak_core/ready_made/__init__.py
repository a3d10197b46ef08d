"""Provide ready-made studies, which a config can name and a user-defined study can call."""
