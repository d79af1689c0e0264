"""How a case is timed, on a GPU and on a CPU."""
