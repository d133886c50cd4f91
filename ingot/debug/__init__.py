"""Look into compiles and artifacts: find faults, differences and costs."""
