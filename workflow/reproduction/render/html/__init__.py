"""Reports as self-contained pages for a browser."""
