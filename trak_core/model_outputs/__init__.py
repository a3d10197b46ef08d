"""Model outputs: the number f(z; theta) that attribution explains, and its loss weight.

Nothing is imported here, so that ``about_outputs`` can be imported without torch.
"""
