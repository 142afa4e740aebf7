"""The tasks of simulated clients, and the audit after the faults."""
