"""Compare the execution of an artifact with its programs: plan, weights, instructions, regions."""
