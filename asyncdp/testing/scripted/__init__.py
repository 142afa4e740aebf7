"""A scripted backend: a test answers each request of a client itself."""
