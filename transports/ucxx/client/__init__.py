"""The client side: which host serves a slot, connections to it, and the shared-memory lane."""
