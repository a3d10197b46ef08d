"""Offer ready-made studies, which a config names and a user-defined study may call."""
