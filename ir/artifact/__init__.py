"""The types of an artifact's files: manifest, plan, trace, records, golden run, tuning log, digests."""
