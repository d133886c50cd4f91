"""Models for evaluation harnesses. Each needs its harness installed, which Ingot does not require."""
