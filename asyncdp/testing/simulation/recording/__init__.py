"""Records of what clients did: the history, its operations and wire requests."""
