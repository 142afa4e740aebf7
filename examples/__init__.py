"""Runnable examples; the wheel carries them as `asyncdp.examples`."""
