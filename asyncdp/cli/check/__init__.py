"""Commands that look at this machine: its config, its arenas, the rules of a Valkey server, what is wrong."""
