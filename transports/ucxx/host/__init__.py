"""The slot host: a process that serves slots to clients."""
