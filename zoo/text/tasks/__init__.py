"""Tasks of the recipes, which need no download: recall, retrieval, words of groups, sorted digits, docstrings."""
