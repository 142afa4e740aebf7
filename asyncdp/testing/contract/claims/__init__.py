"""Promises 4 and 5: each task gets each sample once, in whole batches."""
