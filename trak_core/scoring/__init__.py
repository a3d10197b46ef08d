"""Formulas between features and scores; arrays only."""
