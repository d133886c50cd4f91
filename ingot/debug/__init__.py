"""Looking into compiles and artifacts: who is to blame, what changed, what it costs."""
