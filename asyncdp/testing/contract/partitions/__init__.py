"""Promises 7, 8 and 9: removals, listings and the verbs for recovery."""
