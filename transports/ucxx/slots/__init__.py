"""Slots in an arena of shared memory, without I/O to clients."""
