"""The command line and what it offers: check, explain and its page, the demo, local processes as ranks.

Nothing else may know this folder.
"""
