"""Arguments of benchmarks: shapes and options of their cases, validated."""
