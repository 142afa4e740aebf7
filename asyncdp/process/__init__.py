"""Code that concerns the whole process: forks, the end of event loops, tracebacks, private files."""
