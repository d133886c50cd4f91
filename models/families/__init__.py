"""How families spell their config.json: one reader a family, in terms of the specs of blocks, and one file a kin."""
