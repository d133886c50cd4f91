"""Program to program: the rewrites, the pipeline and the pass manager."""
