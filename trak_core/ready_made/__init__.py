"""Ready-made studies. A config can name them, and a user's own study can call them."""
