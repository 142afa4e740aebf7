"""Faults that a test injects: plans, rules, and the layer that carries them out."""
