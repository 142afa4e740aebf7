"""Planes as child processes: an embedded plane, and a supervised one that an operator runs."""
