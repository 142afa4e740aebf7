"""The command line: one file for each command, in folders by what they work on."""
