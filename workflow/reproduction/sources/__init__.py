"""Sources of tables' numbers: runs, benchmarks, recipes, and measurements made elsewhere. One file each."""
