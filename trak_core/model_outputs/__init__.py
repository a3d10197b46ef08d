"""Model outputs: the number f(z; theta) that attribution explains, and its loss weight.

``about_outputs`` lists them without importing torch, so nothing is imported here.
"""
