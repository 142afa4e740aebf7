"""Commands that ask a plane which runs, as its client."""
