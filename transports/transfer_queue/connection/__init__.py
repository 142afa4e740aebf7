"""The connection of one client to a plane: it is made, watched by a heartbeat, and made again to the next plane."""
