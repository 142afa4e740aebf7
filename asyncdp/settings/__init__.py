"""Checks of users' input: settings of a config, arguments of verbs and of ``stack()``."""
