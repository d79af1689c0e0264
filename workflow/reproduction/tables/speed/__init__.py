"""The speed half of the papers: tables of benchmarks as data, and the numbers that the papers printed for them."""
