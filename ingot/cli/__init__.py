"""The command line: the commands, what they print, consoles and progress."""
