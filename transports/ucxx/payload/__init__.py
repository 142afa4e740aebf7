"""Rows as bytes: the layout of a payload, and how rows are gathered into one."""
