"""Offer ready-made studies, which a config names and a study of one's own may call and change."""
