"""Render the results of a study as HTML pages.

``templates`` contains the markup and the text, and ``style.css`` the colours and sizes. The module
``read_results`` reads the files of results. The other modules compute the values for templates.
"""
