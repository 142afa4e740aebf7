"""The pytest plugin: fixtures, markers, the guard of leaks, the watchdog of event loops."""
