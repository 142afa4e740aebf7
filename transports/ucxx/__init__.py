"""Slot hosts with shared-memory arenas, ports over UCX, a directory on Valkey."""
