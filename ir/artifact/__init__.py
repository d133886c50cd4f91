"""What an artifact's files hold, as types: manifest, plan, trace, records, golden run, tuning log, digests."""
