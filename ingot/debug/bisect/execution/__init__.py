"""Check the execution of an artifact against its programs: weights, recipes, plan, instructions and regions."""
