"""Promises 1, 2 and 6: rows come back as they were put, whole, and never stale."""
