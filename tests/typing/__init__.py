"""What mypy --strict has to accept, or to refuse, in a user's code; checked by `make types`, run by nobody."""
