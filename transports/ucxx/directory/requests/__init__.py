"""Requests to the directory, one file for each kind of what is asked."""
