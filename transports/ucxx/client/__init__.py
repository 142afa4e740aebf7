"""The side of a client: which host serves a slot, connections, the shared-memory lane."""
