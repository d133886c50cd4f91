"""`ingot report`: everything that an artifact recorded of its compile, as one page that opens without a network."""
