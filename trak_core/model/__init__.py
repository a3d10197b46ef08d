"""A study's model under one checkpoint, on one device."""
