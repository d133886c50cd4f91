"""The command line: the commands, their output, consoles and progress."""
