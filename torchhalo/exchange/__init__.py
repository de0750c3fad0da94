"""Layouts, plans, exchanges and folds: what each rank owns, needs and sends, and how a local kernel runs over it.

Knows geometry and torch_internals. Knows no op: an op hands in its windows and its kernel.
"""
