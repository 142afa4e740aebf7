"""Rows in memory: columns of tensors and objects, and the conversion of users' values to and from them."""
