"""The engine in a process of its own: the process, its client, and the messages between them."""
