"""Model outputs: the number f(z; theta) that attribution explains, with its loss weight.

``table`` says which there are. It is read where torch must not be loaded: nothing is imported here.
"""
