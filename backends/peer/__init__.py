"""The peer backend: an all-reduce of our own kernel, which reads the memory of the other GPUs of a mesh axis."""
