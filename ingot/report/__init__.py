"""`ingot report`: the record of an artifact's compile, as one page that opens without a network."""
