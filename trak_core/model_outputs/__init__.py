"""Model outputs: the numbers f that attribution explains, with loss weights and curvatures.

This file imports nothing, so that ``about_outputs`` can be imported without torch.
"""
