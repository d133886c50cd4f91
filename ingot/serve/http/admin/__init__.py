"""The routes of operators, on a socket of their own: pause, sleep, caches, profiles."""
