"""What serving on a GPU adds: weights copied to it, and its memory shared out."""
