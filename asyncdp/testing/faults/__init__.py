"""Fault injection: plans, rules, and the layer that executes them."""
