"""Checks of what a user gives: settings of a config, arguments of verbs and of ``stack()``."""
