"""What each benchmark takes: the shapes and options of its cases, validated."""
