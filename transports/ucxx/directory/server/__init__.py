"""The Valkey or Redis server: connections to it, its rights and errors, its notices, and one as a child process."""
