"""What an artifact executes against what its programs say: plan, weights, instructions, regions."""
