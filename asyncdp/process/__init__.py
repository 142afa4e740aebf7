"""What concerns the whole process: forks, the end of an event loop, tracebacks, files that only their user may read."""
