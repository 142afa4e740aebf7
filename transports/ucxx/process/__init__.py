"""Planes as processes: a plane of one's own, and one that an operator serves."""
