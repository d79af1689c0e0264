"""Where tables have their numbers from: runs, benchmarks, recipes, and measurements made elsewhere. A file each."""
