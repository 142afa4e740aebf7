"""Loaded by every Python process of a run of NeMo-RL's tests, so that processes that they start have the stubs too."""

import stubs

stubs.install()
