"""The pytest plugin: fixtures, markers, the leak guard, and the watchdog of event loops."""
