"""Promises 10, 10b and 11: deadlines, cancels, closing, event loops and forks."""
