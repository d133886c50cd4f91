"""How long a step takes, call by call: at best, by prediction, and measured."""
