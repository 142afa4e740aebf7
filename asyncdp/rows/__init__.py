"""Rows in memory: columns of tensors and objects, and how a user's values become them."""
