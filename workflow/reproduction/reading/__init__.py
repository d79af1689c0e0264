"""Files that the reproduction reads, whatever they are about: YAML and CSV that people write, arrays of numbers."""
