"""Ranks on other hosts: an agent on each starts them, and relays orders and reports over one TCP connection."""
