"""Model outputs: functions f of a model's result, whose values attribution explains.

This file imports nothing, so that ``about_outputs`` can be imported without torch.
"""
