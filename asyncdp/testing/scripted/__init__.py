"""A backend whose answers a test writes."""
