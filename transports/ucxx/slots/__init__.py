"""Slots in an arena of shared memory."""
