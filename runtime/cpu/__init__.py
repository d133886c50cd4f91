"""What serving on a CPU takes."""
