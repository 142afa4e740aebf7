"""Decisions without I/O: when to retry, which port to use, whom to wait for."""
